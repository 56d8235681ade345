"""What a certificate is worth: the gate, and what is counted of it."""
