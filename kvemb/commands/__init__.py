"""What the verbs of the `kvemb` command do and print; the command line itself is read in `kvemb.cli`."""
