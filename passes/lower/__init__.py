"""Lowering: pairs directions, fuses producers and epilogues, and replaces operators by what runs on the device."""
