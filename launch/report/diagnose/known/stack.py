"""Known failures of the environment, the model and the data."""

from __future__ import annotations

from launch.report.diagnose.known.symptom import Symptom

STACK: tuple[Symptom, ...] = (
    Symptom("ray-start", "have not registered within the timeout",
            "Ray's workers did not start in time, on a slow file system or an overloaded node.",
            "Increase run.deadline_s, or put the environment on a local disk or in a container.",
            logs=r"have not registered within the timeout|Failed to register worker|did not (?:start|"
                 r"register) within"),
    Symptom("missing-module", "ModuleNotFoundError",
            "A package is missing in the environment of a node.",
            "Use the same environment on every node: `make install`, or the container of the site profile.",
            logs=r"ModuleNotFoundError: No module named '(?!launch)",
            weight=0),
    Symptom("model-files", "weight files are missing in",
            "The model's folder is incomplete, or missing on a node.",
            "Copy the file that the message names again. model.path must be on a shared file system.",
            logs=r"weight files are missing in|holds neither model\.safetensors|"
                 r"the model folder \S+ does not exist|tensors are missing in|is truncated or damaged|"
                 r"No such file or directory: '\S+\.safetensors'",
            outcome=r"weight files are missing in|holds neither model\.safetensors|"
                    r"the model folder \S+ does not exist|tensors are missing in|is truncated or damaged",
            weight=0),
    Symptom("tokenizer", "holds no tokenizer",
            "Tokenizer files are missing or damaged, or the chat template does not fit the data.",
            "Copy tokenizer.json and tokenizer_config.json of the model again, or set data.chat_template.",
            logs=r"holds no tokenizer|the tokenizer in \S+ cannot be read|[Cc]an't load tokenizer for",
            outcome=r"holds no tokenizer|the tokenizer in \S+ cannot be read|chat template",
            weight=0),
    Symptom("offline", "couldn't connect to 'https://huggingface.co'",
            "Something tried to download, usually a name from the Hub instead of a folder. Jobs run offline.",
            "Use local folders and files: model.path, data.train, data.eval.",
            logs=r"couldn't connect to 'https://huggingface\.co|OfflineModeIsEnabled|"
                 r"outgoing traffic has been disabled",
            weight=0),
    Symptom("digest", "the engines do not hold what the trainer sent",
            "An engine held other weights than the trainer sent: a fault of memory, network or this program. They "
            "were not served.",
            "Start again to continue from the checkpoint. Exclude a node that is named twice.",
            logs=r"the engines do not hold what the trainer sent",
            weight=0),
)
