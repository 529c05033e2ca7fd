"""The exceptions of factpatch. Each message says what is wrong and what to do."""


class FactpatchError(Exception):
    """Any error that the user can fix. The command line prints its message on one line and exits with 1."""


class InputError(FactpatchError):
    """An invalid text, target, record or option."""


class ModelError(FactpatchError):
    """A model that cannot be found, loaded or edited."""


class MismatchError(FactpatchError):
    """A patch, an editor or a revision file that was made for another model."""


class FileError(FactpatchError):
    """A file that is missing, damaged or cannot be written."""


class LedgerInUseError(FileError):
    """A ledger that another process is writing to. It can be used again when that process is done."""


class DeviceError(FactpatchError):
    """A device that this machine does not have."""


class TrainingError(FactpatchError):
    """A training run that cannot continue."""


def reason(error: BaseException) -> str:
    """Returns the first line of another package's error, to be quoted in one of our messages."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
