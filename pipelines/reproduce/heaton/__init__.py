"""Two scenes of land temperature, all 150,000 cells, beside kriging with 30 neighbours."""
