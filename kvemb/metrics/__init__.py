"""Figures for Prometheus: counted where they arise, read when somebody scrapes; prometheus-client does the format and the port."""
