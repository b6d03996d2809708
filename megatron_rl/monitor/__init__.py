"""What a run tells: metrics and their writers, samples to look at, detectors of runs that go wrong."""
