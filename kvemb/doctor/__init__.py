"""What `kvemb doctor` finds wrong: everything is asked first, then judged, and each finding comes with its mend."""
