"""What fits claim, against references that share no code with them."""
