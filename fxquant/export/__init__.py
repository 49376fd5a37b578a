"""Exported programs: quantizes, lowers, packages and saves them."""
