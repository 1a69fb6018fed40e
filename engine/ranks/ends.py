"""How a channel to another rank's process fails."""


class ChannelClosed(Exception):
    """The other process has ended, or it is going to."""


class ChannelFull(Exception):
    """The other process has read nothing for too long."""
