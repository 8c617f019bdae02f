"""`python -m lit_llm certify`: check lit_llm's promises on this machine, and write a certificate with the checks' outcomes."""
