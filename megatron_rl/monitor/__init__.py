"""What a run reports: metrics and their writers, samples for people, detectors of diverging runs."""
