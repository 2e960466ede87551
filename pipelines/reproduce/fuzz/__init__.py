"""Ten thousand broken inputs: each is read, or refused in one line, and nothing else happens."""
