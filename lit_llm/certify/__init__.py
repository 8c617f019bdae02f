"""Checks of the library's promises on the machine that runs them, and the certificate that records their outcomes."""
