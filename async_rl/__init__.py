from async_rl.own_packages import find_own_packages_first

find_own_packages_first()
