"""Known failures of the environment, the model and the data."""

from __future__ import annotations

from launch.report.diagnose.known.symptom import Symptom

STACK: tuple[Symptom, ...] = (
    Symptom("ray-start", "have not registered within the timeout",
            "Ray's workers did not come up in time: many start at once, on a slow file system or an overloaded "
            "node.",
            "A higher run.deadline_s; the environment on a local disk or in a container instead of a shared file "
            "system.",
            logs=r"have not registered within the timeout|Failed to register worker|did not (?:start|"
                 r"register) within"),
    Symptom("missing-module", "ModuleNotFoundError",
            "A package is missing in the environment that the node uses.",
            "`make install` (or the container of the site profile); the same environment on every node.",
            logs=r"ModuleNotFoundError: No module named '(?!launch)",
            weight=0),
    Symptom("model-files", "weight files are missing in",
            "The model's folder is incomplete, or not there on a node.",
            "The message names the file: copy it again. model.path must lie on a file system that every node sees.",
            logs=r"weight files are missing in|holds neither model\.safetensors|"
                 r"the model folder \S+ does not exist|tensors are missing in|is truncated or damaged|"
                 r"No such file or directory: '\S+\.safetensors'",
            outcome=r"weight files are missing in|holds neither model\.safetensors|"
                    r"the model folder \S+ does not exist|tensors are missing in|is truncated or damaged",
            weight=0),
    Symptom("tokenizer", "holds no tokenizer",
            "The tokenizer's files are missing or damaged, or its chat template does not fit the data.",
            "Copy tokenizer.json and tokenizer_config.json of the model again; data.chat_template chooses the "
            "template.",
            logs=r"holds no tokenizer|the tokenizer in \S+ cannot be read|[Cc]an't load tokenizer for",
            outcome=r"holds no tokenizer|the tokenizer in \S+ cannot be read|chat template",
            weight=0),
    Symptom("offline", "couldn't connect to 'https://huggingface.co'",
            "Something tried to download: a name from the Hub where a folder is needed. Jobs are offline on "
            "purpose.",
            "Give local folders and files: model.path, data.train, data.eval.",
            logs=r"couldn't connect to 'https://huggingface\.co|OfflineModeIsEnabled|"
                 r"outgoing traffic has been disabled",
            weight=0),
    Symptom("digest", "the engines do not hold what the trainer sent",
            "After a weight sync an engine holds other weights than the trainer sent: a fault of memory or "
            "network, or of this program. Nothing was served from them.",
            "Start again (it goes on from the checkpoint); if the same node is named twice, leave it out.",
            logs=r"the engines do not hold what the trainer sent",
            weight=0),
)
