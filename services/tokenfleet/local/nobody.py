"""Nobody: how a child of root gives up root and still reads a checkout under a closed folder such as /root.

PostgreSQL refuses to run as root. As plain `nobody` it could not even open its own binary below a folder of mode
0700. So the child keeps one right, CAP_DAC_OVERRIDE, in its ambient set, which survives exec; see capabilities(7).
"""

import ctypes
import os
import pwd
from collections.abc import Callable

CAP_DAC_OVERRIDE = 1  # linux/capability.h
CAPABILITY_VERSION_3 = 0x20080522
PR_SET_KEEPCAPS = 8  # linux/prctl.h
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
OVERFLOW_ID = 65534  # what the kernel itself uses for "nobody"

LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: nothing may be imported between fork and exec


class CapabilityHeader(ctypes.Structure):
    """struct __user_cap_header_struct."""

    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class CapabilityData(ctypes.Structure):
    """struct __user_cap_data_struct; version 3 takes two, for 64 rights."""

    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def become_nobody() -> Callable[[], None]:
    """What a child of root calls between fork and exec; everything it needs is looked up now.

    The call raises OSError when this root has no right to change its user, as in some sandboxes.
    """
    user_id, group_id = nobody_ids()
    header = CapabilityHeader(CAPABILITY_VERSION_3, 0)
    one_right = CapabilityData(1 << CAP_DAC_OVERRIDE, 1 << CAP_DAC_OVERRIDE, 1 << CAP_DAC_OVERRIDE)
    rights = (CapabilityData * 2)(one_right, CapabilityData(0, 0, 0))

    def change() -> None:
        checked(LIBC.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0))
        os.setgroups([])
        os.setresgid(group_id, group_id, group_id)
        os.setresuid(user_id, user_id, user_id)
        checked(LIBC.capset(ctypes.byref(header), rights))
        checked(LIBC.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE, 0, 0))

    return change


def nobody_ids() -> tuple[int, int]:
    """User and group id of `nobody`."""
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        return OVERFLOW_ID, OVERFLOW_ID
    return entry.pw_uid, entry.pw_gid


def checked(result: int) -> None:
    """Raises OSError for a call of the C library that failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
