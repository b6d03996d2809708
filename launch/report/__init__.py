"""What people see of a run: live progress, the reward curve in the terminal, the HTML report."""
