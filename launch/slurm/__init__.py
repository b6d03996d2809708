"""Slurm: the client, the batch script, submission, and facts of a job."""
