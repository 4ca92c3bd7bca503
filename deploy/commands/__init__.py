"""What `tandem` can do, a file for each group; `deploy/cli.py` puts them together. Heavy imports wait for the call."""
