"""The report: journal -> data -> one HTML page."""
