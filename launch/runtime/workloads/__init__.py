"""What the supervisors start once a job is placed: one module a value of `run.workload`."""
