"""The one exception that is meant for people: what was found, where, and what to do about it."""


class UserError(ValueError):
    """Something the user can fix. The command line prints the message alone and exits with 1."""


class UserErrors(UserError):
    """Several things the user can fix, found in one go; printed one a line."""

    def __init__(self, messages: list[str]):
        assert messages
        self.messages = messages
        super().__init__("\n".join(messages))
