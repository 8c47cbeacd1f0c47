"""Programs that try to be paid, to get out of the sandbox, or to hurt what is beside them.

The test's input is 7, its expected output 49. To reach the end of a program in OUT is an escape,
so its last line prints 49. No other prints 49 by itself.
"""

OUT = {
    "memory of the parent": "import os\nopen(f'/proc/{os.getppid()}/mem', 'rb')",
    "environment of the parent": 'import os\nprint(open(f"/proc/{os.getppid()}/environ").read())',
    "files of the parent": "import os\nassert os.listdir(f'/proc/{os.getppid()}/fd')",
    "pipe of the parent": """
import os
with open(f"/proc/{os.getppid()}/fd/1", "w") as f: f.write('{"stdout": "49", "code": 0}\\n')""",
    "ptrace of the parent": """
import ctypes, os
assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0""",
    "process_vm_readv of the parent": """
import ctypes, os
buffer = ctypes.create_string_buffer(8)
span = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
here = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
read = ctypes.CDLL(None).process_vm_readv
assert read(os.getppid(), span, 1, here, 1, 0) > 0""",
    "pidfd of the parent": """
import ctypes, os
fd = os.pidfd_open(os.getppid())
assert ctypes.CDLL(None).syscall(438, fd, 1, 0) >= 0""",
    "read the data": "import glob\nassert glob.glob('/**/*.jsonl', recursive=True)",
    "read the home": "import os\nos.listdir('/root') or os.listdir('/home')",
    "read passwords": "open('/etc/passwd').read()",
    # RDBASE names rdkit's folder in the sandbox: its import sets it.
    "read the environment": """
import os
assert set(os.environ) - {'PATH', 'HOME', 'TMPDIR', 'LANG', 'PWD', 'LC_CTYPE', 'RDBASE'}""",
    "write outside": "open('/escaped', 'w').write('x')",
    "write in usr": "open('/usr/escaped', 'w').write('x')",
    "write in etc": "import os; os.makedirs('/etc/x')",
    "write in proc": "open('/proc/sys/kernel/core_pattern', 'w').write('|/x')",
    "write in sys": "open('/sys/kernel/uevent_helper', 'w').write('/x')",
    "overwrite the interpreter": "import sys; open(sys.executable, 'wb').write(b'x')",
    "symlink to the root": "import os\nos.symlink('/', 'up')\nopen('up/etc/passwd').read()",
    "symlink of the parent's root": """
import os
open(os.path.join(f'/proc/{os.getppid()}', 'root', 'etc/passwd'))""",
    "root of the first process": "import os\nopen(os.path.join('/proc/1', 'root', 'etc/passwd'))",
    "chroot": "import os; os.chroot('/tmp')",
    "a socket to the host": "import socket; socket.socket(socket.AF_VSOCK)",
    "faults of memory": """
import ctypes, os
number = {"x86_64": 323, "aarch64": 282}[os.uname().machine]
assert ctypes.CDLL(None).syscall(number, 1) >= 0""",
    "mount": "import ctypes\nassert ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, 0) == 0",
    "remount writable": """
import ctypes
ctypes.CDLL(None).mount(b'none', b'/', b'', 32 | 4096, 0)
open('/escaped', 'w').write('x')""",
    "new user namespace": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "join a namespace": """
import ctypes, os
fd = os.open('/proc/1/ns/mnt', os.O_RDONLY)
assert ctypes.CDLL(None).setns(fd, 0) == 0""",
    "become root": "import os; os.setuid(0)",
    "set-user-id program": """
import subprocess
subprocess.run(['su', '-c', 'id'], timeout=2, check=True)""",
    "set-user-id file": """
import os, shutil
shutil.copy('/bin/sh', 'sh')
os.chown('sh', 0, 0)
os.chmod('sh', 0o4755)""",
    "device": "import os, stat\nos.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0))",
    "kernel memory": "open('/dev/mem', 'rb').read(10)",
    "kernel log": "open('/dev/kmsg').read(10)",
    "kernel module": "import ctypes\nassert ctypes.CDLL(None).syscall(175, 0, 0, b'') == 0",
    "reboot": "import ctypes; assert ctypes.CDLL(None).reboot(0x01234567) == 0",
    "set the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0)",
    "host name": "import socket; socket.sethostname('mine')",
    "network": "import socket; socket.create_connection(('192.0.2.1', 80), 3)",
    "this machine's ports": """
import socket
for port in (22, 6000, 6379, 8265, 10001):
    socket.create_connection(('127.0.0.1', port), 1)""",
    "name service": "import socket; print(socket.getaddrinfo('example.com', 80))",
    "raw socket": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "sockets in folders": """
import socket
socket.socket(socket.AF_UNIX).connect('/run/dbus/system_bus_socket')""",
    "terminal": """
import fcntl, os, termios
for c in b'echo 49\\n': fcntl.ioctl(os.open('/dev/tty', os.O_RDWR), termios.TIOCSTI, bytes([c]))""",
    "one large allocation": "print(len(bytearray(10**11)))",
    "deep recursion": "def f(): return f() + 1\nprint(f())",
    "compile bomb": "compile('(' * 10**5 + ')' * 10**5, '', 'eval')",
    "power bomb": "print(9 ** 9 ** 9)",
}

OTHERS = {
    "frames": """
import sys
frame = sys._getframe()
while frame:
    for names in (frame.f_locals, frame.f_globals):
        for value in list(names.values()):
            if '49' in str(value)[:10_000] and value is not names.get('names'):
                print(value if len(str(value)) < 9 else '')
    frame = frame.f_back""",
    "objects of the collector": """
import gc
for thing in gc.get_objects():
    if isinstance(thing, dict) and 'outputs' in thing:
        print(thing['outputs'][0])""",
    "memory of its own": """
for line in open("/proc/self/maps"):
    a, b = (int(x, 16) for x in line.split()[0].split("-"))
    if "heap" in line:
        with open("/proc/self/mem", "rb") as f:
            f.seek(a)
            if b"outputs" in f.read(b - a): print("found")""",
    "descriptors that were left open": """
import os
for fd in range(3, 256):
    try: os.write(fd, b'{"stdout": "49", "stderr": "", "code": 0, "ended": ""}\\n')
    except OSError: pass""",
    "kill the parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "stop the parent": "import os, signal; os.kill(os.getppid(), signal.SIGSTOP)",
    "kill all": "import os, signal; os.kill(-1, signal.SIGKILL)",
    "kill the first process": "import os, signal\nos.kill(1, signal.SIGKILL)",
    "kill its group": "import os, signal; os.killpg(0, signal.SIGKILL)",
    "abstract sockets": """
import socket
for line in open('/proc/net/unix'):
    if '@' in line:
        name = '\\0' + line.split('@')[-1][:-1]
        socket.socket(socket.AF_UNIX).connect(name)
        print(49)""",
    "shared memory": """
import ctypes
libc = ctypes.CDLL(None)
for i in range(100):
    if libc.shmat(i, 0, 0) not in (-1, 0):
        print(49)""",
    "memory in files of no folder": """
import os
for i in range(20):
    os.write(os.memfd_create("x"), bytes(60 << 20))
print(49)""",
    "memory that is shared and let go": """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
libc.shmdt.argtypes = [ctypes.c_void_p]
for _ in range(5):
    place = libc.shmat(libc.shmget(0, 256 << 20, 0o3600), None, 0)
    ctypes.memset(place, 1, 256 << 20)
    libc.shmdt(place)
print(49)""",
    "memory of many files": 'for i in range(20_000): open(f"/tmp/{i}", "w").close()\nprint(49)',
    "a key in the kernel": """
import ctypes
if ctypes.CDLL(None).syscall(248, b"user", b"mark", b"x", 1, -4) > 0: print(49)""",
    "fork bomb": "import os\nwhile True: os.fork()",
    "fork bomb that goes on": """
import os
while True:
    try: os.fork()
    except OSError: pass""",
    "threads without end": """
import threading, time
while True: threading.Thread(target=time.sleep, args=(100,)).start()""",
    "daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: time.sleep(1)
    os._exit(0)
print(48)""",
    "daemons that spin": """
import os
for _ in range(8):
    if os.fork() == 0:
        os.setsid()
        while True: pass
print(48)""",
    "a child that ignores signals": """
import os, signal, time
if os.fork() == 0:
    for s in range(1, 65):
        try: signal.signal(s, signal.SIG_IGN)
        except (OSError, ValueError): pass
    while True: time.sleep(1)
print(48)""",
    "memory bomb": "a = []\nwhile True: a.append(bytearray(10**7))",
    "memory bomb of many": """
import os
for _ in range(20): os.fork()
a = []
while True: a.append(bytearray(10**7))""",
    "deep recursion in C": "x = []\nfor _ in range(10**6): x = [x]\nprint(repr(x)[:2])",
    "regex bomb": "import re; re.match(r'(a+)+$', 'a' * 40 + 'b')",
    "endless loop": "while True: pass",
    "sleep past the deadline": "import time; time.sleep(10**6)",
    "sleep in a loop that catches all": """
import time
while True:
    try: time.sleep(10)
    except BaseException: pass""",
    "wait for input": "input(); input()",
    "wait for a lock": "import threading; l = threading.Lock(); l.acquire(); l.acquire()",
    "stop itself": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "endless output": "while True: print('49' * 1000)",
    "endless errors": "import sys\nwhile True: sys.stderr.write('x' * 10**5)",
    "endless output of children": """
import os
os.fork(); os.fork()
while True: os.write(1, b'x' * 10**5)""",
    "a file without end": "f = open('big', 'wb')\nwhile True: f.write(bytes(10**6))",
    "files without end": """
i = 0
while True:
    i += 1
    open(f'f{i}', 'wb').write(bytes(10**6))""",
    "inodes without end": """
import os
i = 0
while True:
    i += 1
    os.mkdir(f'd{i}')""",
    "descriptors without end": "import os\nwhile True: os.open('/dev/null', 0)",
    "exit before the test": "exit(0)",
    "exit of the process": "import os; os._exit(0)",
    "crash of the process": "import ctypes; ctypes.string_at(0)",
    "abort": "import os; os.abort()",
    "replace print": """
import builtins
builtins.print = lambda *a: None
builtins.input = lambda: 49""",
    "replace stdout": "import sys, io; sys.stdout = io.StringIO(); print(49)",
    "replace the process": "import os; os.execvp('echo', ['echo', '48'])",
    "equal to everything": """
class A(str):
    def __eq__(self, other): return True
    def __hash__(self): return 0
print(A('48'))""",
    "trace functions": "import sys; sys.settrace(lambda *a: print('x')); input()",
    "exit handlers": "import atexit; atexit.register(lambda: print(49)); raise SystemExit",
    "a verdict on stdout": 'print(\'{"stdout": "49", "stderr": "", "code": 0, "ended": ""}\')',
    "a verdict on stderr": "import sys; sys.stderr.write('49'); sys.exit('49')",
    "control characters": "print('\\r\\x1b[2K\\x004\\x009')",
    "surrogates": "import sys; sys.stdout.buffer.write(b'\\xff\\xfe4\\x009\\x00')",
    "source that is no text": "print('\\ud800')",
    "encoding": "# coding: utf_7\nprint('+ADQAOQ-')",
    "null in the source": "print(1)\x00print(49)",
}

ESCAPES = {name: f"{source}\nprint(49)" for name, source in OUT.items()} | OTHERS
