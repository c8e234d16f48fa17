"""Exports for other programs: an encoder for other libraries, and rows with their images."""
