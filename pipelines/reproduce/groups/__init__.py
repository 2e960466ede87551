"""Surveys whose zero points differ, mapped with and without `data.groups`."""
