"""Maps of 20,000 stars that no setting has touched, beside those of an earlier version."""
