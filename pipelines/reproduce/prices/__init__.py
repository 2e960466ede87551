"""Prices of houses: what a user of estimators gets, each as it comes."""
