"""All that the parts share, and the driver. Importing it makes this process find the packages of this project."""

from async_rl.seams.own_packages import find_own_packages_first

find_own_packages_first()
