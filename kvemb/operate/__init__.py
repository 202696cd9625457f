"""What operators see of a cluster: its status, what is wrong with it and the mend of each finding, what it will need and reach."""
