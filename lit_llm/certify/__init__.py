"""Checks of what the library promises, on the machine that runs them, and the certificate that says what was shown."""
