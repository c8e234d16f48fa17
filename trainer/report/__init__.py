"""The HTML report of a run: its curves, results and settings, nearest neighbours and saliency."""
