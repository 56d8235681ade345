"""What a certificate is worth: the gate, what is counted of it, and which pages to read exact."""
