"""Every engine on real and simulated tables of 500 to 200,000 rows in one to eight columns."""
