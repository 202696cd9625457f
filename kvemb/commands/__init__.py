"""What the verbs of the `kvemb` command do and print; `kvemb.cli` reads the command line itself."""
