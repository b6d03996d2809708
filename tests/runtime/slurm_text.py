"""A job as Slurm prints it."""

JOB = """\
JobId=7 JobName=grpo
   Account=(null) QOS=(null)
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:05 TimeLimit=00:30:00 TimeMin=N/A
   StartTime=Unknown EndTime={end} Deadline=N/A
   Partition=batch AllocNode:Sid=login:4242
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=n[001-004]
   BatchHost=n001
   NumNodes=4 NumCPUs=192 NumTasks=4
   Command=/home/alice/grpo.sbatch
   WorkDir=/home/alice
   Comment=(null)
   StdOut=/home/alice/grpo-7.log
"""
