"""Small virtual machines with a real ``/dev/dax``, under software emulation: see docs/testing-vm.md.

:mod:`~scripts.vm.packages` fetches what is needed, :mod:`~scripts.vm.image` makes what a guest boots from, and
:mod:`~scripts.vm.guest` runs guests. Everything lies in one cache folder; nothing is installed on the host.
"""
