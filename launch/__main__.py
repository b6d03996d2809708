import sys

if sys.argv[1:2] == ["job"]:        # before anything else is imported
    from launch import early_signals

    early_signals.catch()

from launch.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
