"""Slurm: the client, the batch script, submission, facts of a job."""
