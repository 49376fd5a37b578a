"""Exported programs: stores weights quantized, lifts state, calibrates scales, and prepares packages."""
