"""Helpers that the tests share: the first line of each file says what it has."""
