"""The few exceptions of factpatch. Each message says what was expected, what was found and what to do."""


class FactpatchError(Exception):
    """Anything a user can mend. The command line prints it as one line and exits with 1."""


class InputError(FactpatchError):
    """A text, a target, a record or an option that cannot be used."""


class ModelError(FactpatchError):
    """A model that cannot be found, loaded or edited."""


class MismatchError(FactpatchError):
    """A patch or an editor made for other weights."""


class FileError(FactpatchError):
    """A file that is missing, damaged or cannot be written."""


class DeviceError(FactpatchError):
    """A device that this machine does not have."""


class TrainingError(FactpatchError):
    """A run that cannot go on."""
