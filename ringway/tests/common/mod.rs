//! Runs the real program from outside.
#![allow(dead_code)] // Each test file uses its part.

pub(crate) mod browser;
pub(crate) mod exports;
pub(crate) mod guest;
pub(crate) mod nbd;

use ringway_driver::{BlkQueue, Device};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

/// How long anything may take before a test fails: a loaded machine is slow.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The program, in an environment that tells it nothing.
pub(crate) fn ringway() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringway"));
    for name in ["RUST_LOG", "NO_COLOR", "NOTIFY_SOCKET", "WATCHDOG_USEC", "LISTEN_FDS", "COLUMNS"]
    {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    with_signals(&mut command);
    command
}

/// Has a program begin with signals that end it, though whoever runs the tests ignores them (`nohup`, `&`).
fn with_signals(command: &mut Command) {
    // SAFETY: signal may be called between fork and exec.
    unsafe {
        command.pre_exec(|| {
            for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM] {
                libc::signal(signal, libc::SIG_DFL);
            }
            Ok(())
        });
    }
}

/// Runs a command that must end by itself.
pub(crate) fn run(mut command: Command) -> Output {
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let readers = (read_all(child.stdout.take()), read_all(child.stderr.take()));
    let status = wait(&mut child, PATIENCE);
    if status.is_none() {
        child.kill().unwrap();
    }
    let (stdout, stderr) = (readers.0.join().unwrap(), readers.1.join().unwrap());
    let output = format!("{}{}", text(&stdout), text(&stderr));
    Output {
        status: status.unwrap_or_else(|| panic!("it does not end:\n{output}")),
        stdout,
        stderr,
    }
}

/// Reads a pipe to its end on a thread of its own: one that is full would stop the child.
fn read_all(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.expect("it is piped").read_to_end(&mut bytes).expect("it can be read");
        bytes
    })
}

/// Bytes as text.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The end of a child, if it comes within `patience`.
pub(crate) fn wait(child: &mut Child, patience: Duration) -> Option<ExitStatus> {
    let deadline = Instant::now() + patience;
    loop {
        match child.try_wait().unwrap() {
            Some(status) => return Some(status),
            None if Instant::now() > deadline => return None,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// A running daemon; dropping it kills it.
pub(crate) struct Daemon {
    child: Child,
    stdout: BufReader<ChildStdout>,
    stderr: tempfile::NamedTempFile,
    /// The first line it printed.
    pub(crate) ready: String,
}

impl Daemon {
    /// `ringway serve ARGS`, run in `dir`; returns once it is ready.
    pub(crate) fn serve(dir: &Path, args: &[&str]) -> Self {
        let mut command = ringway();
        command.arg("serve").args(args).current_dir(dir);
        Self::start(command)
    }

    /// As [`Daemon::serve`], for any command that prints a line when it is ready.
    pub(crate) fn start(mut command: Command) -> Self {
        let stderr = tempfile::NamedTempFile::new().unwrap();
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(stderr.reopen().unwrap())
            .spawn()
            .expect("it starts");
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut ready = String::new();
        stdout.read_line(&mut ready).unwrap();
        let daemon = Self { child, stdout, stderr, ready };
        assert!(!daemon.ready.is_empty(), "it is not ready:\n{}", daemon.log());
        daemon
    }

    /// The next line it prints.
    pub(crate) fn next_line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        line
    }

    /// What it has logged so far.
    pub(crate) fn log(&self) -> String {
        // The daemon may be in the middle of a character.
        String::from_utf8_lossy(&std::fs::read(self.stderr.path()).unwrap()).into_owned()
    }

    /// The number of its process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub(crate) fn signal(&self, signal: i32) {
        let pid = i32::try_from(self.child.id()).unwrap();
        // SAFETY: our own child, not waited for yet, so the number is still its own.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0, "it has ended:\n{}", self.log());
    }

    /// Waits for its end: the status, and all it printed after the first line.
    pub(crate) fn wait(&mut self) -> (ExitStatus, String) {
        let status = wait(&mut self.child, PATIENCE);
        let status = status.unwrap_or_else(|| panic!("it does not end:\n{}", self.log()));
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        (status, rest)
    }

    /// SIGTERM, then [`Daemon::wait`].
    pub(crate) fn stop(mut self) -> String {
        self.signal(libc::SIGTERM);
        let (status, rest) = self.wait();
        assert_eq!(status.code(), Some(0), "{}", self.log());
        rest
    }

    /// SIGKILL.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A folder with an image of 1 MiB, `disk.img`.
pub(crate) fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("disk.img"), vec![0; 1 << 20]).unwrap();
    dir
}

/// All that a user could miss: names, kinds, owners, modes, times and contents.
pub(crate) fn snapshot(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let meta = path.symlink_metadata().unwrap();
        let mut facts = format!(
            "{:o} {}:{} {} {}.{}",
            meta.mode(),
            meta.uid(),
            meta.gid(),
            meta.ino(),
            meta.mtime(),
            meta.mtime_nsec()
        );
        if meta.is_dir() {
            found.extend(snapshot(&path));
        } else if meta.is_file() {
            facts = format!("{facts} {:?}", std::fs::read(&path).map(|bytes| fnv1a(&bytes)));
        }
        found.insert(path, facts);
    }
    found
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Carries out one request that has been queued.
pub(crate) fn finish(queue: &mut BlkQueue<()>) -> (bool, Vec<u8>) {
    assert!(queue.wait(Some(PATIENCE)).unwrap(), "no answer");
    let done = queue.pop().unwrap().unwrap();
    (done.is_ok(), done.into_buffer().map(|buffer| buffer.to_vec()).unwrap_or_default())
}

/// Writes a sector full of `byte`; false if the disk refuses.
pub(crate) fn write(device: &Device, queue: &mut BlkQueue<()>, sector: u64, byte: u8) -> bool {
    let mut buffer = device.pool().alloc(512).unwrap();
    buffer.fill(byte);
    queue.write(sector * 512, buffer, ()).unwrap();
    finish(queue).0
}

/// Reads a sector.
pub(crate) fn read(device: &Device, queue: &mut BlkQueue<()>, sector: u64) -> Vec<u8> {
    let buffer = device.pool().alloc(512).unwrap();
    queue.read(sector * 512, buffer, ()).unwrap();
    let (ok, bytes) = finish(queue);
    assert!(ok, "sector {sector} cannot be read");
    bytes
}

/// Reads the serial number.
pub(crate) fn serial(device: &Device, queue: &mut BlkQueue<()>) -> String {
    let buffer = device.pool().alloc(20).unwrap();
    queue.get_id(buffer, ()).unwrap();
    text(&finish(queue).1).trim_end_matches('\0').to_owned()
}

/// `ringway copy ARGS`, run in `dir`.
pub(crate) fn copy(dir: &Path, args: &[&str]) -> Output {
    let mut command = ringway();
    command.arg("copy").args(args).current_dir(dir);
    run(command)
}

/// As [`copy`], which must succeed: what it says.
#[track_caller]
pub(crate) fn copies(dir: &Path, args: &[&str]) -> String {
    let output = copy(dir, args);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
    // The last writes of one that was killed may be under way.
    let said = text(&output.stderr);
    let said: Vec<_> =
        said.lines().filter(|line| !line.contains("in case it was killed")).collect();
    assert!(said.is_empty(), "{args:?}: no bar without a terminal: {said:?}");
    text(&output.stdout)
}

/// Two files hold the same.
#[track_caller]
pub(crate) fn same(one: &Path, other: &Path) {
    let (one, other) = (std::fs::read(one).unwrap(), std::fs::read(other).unwrap());
    assert_eq!(one.len(), other.len());
    if let Some(at) = one.iter().zip(&other).position(|(a, b)| a != b) {
        panic!("they differ at byte {at}");
    }
}

/// The children of a process; one that has ended is among them until somebody has asked how.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    text.split_whitespace().map(|word| word.parse().unwrap()).collect()
}

/// All processes that descend from this one.
pub(crate) fn descendants(pid: u32) -> Vec<u32> {
    let mut all = children(pid);
    let mut at = 0;
    while let Some(&pid) = all.get(at) {
        // One that has ended has none.
        let path = format!("/proc/{pid}/task/{pid}/children");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        all.extend(text.split_whitespace().filter_map(|word| word.parse::<u32>().ok()));
        at += 1;
    }
    all
}

/// Waits until these processes have ended.
#[track_caller]
pub(crate) fn until_ended(pids: &[u32]) {
    let stat = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let lives = |pid: &&u32| !stat(**pid).is_empty() && !stat(**pid).contains(") Z ");
    let deadline = Instant::now() + PATIENCE;
    while let Some(pid) = pids.iter().find(lives) {
        assert!(Instant::now() < deadline, "it lives on: {}", stat(*pid));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// As the service manager, or the kernel for want of memory, kills a whole group at once: the daemon, its helper,
/// and whatever else it has.
pub(crate) fn kill_all(daemon: Daemon) {
    let (pid, others) = (daemon.pid(), descendants(daemon.pid()));
    assert!(!others.is_empty());
    for signal in [libc::SIGSTOP, libc::SIGKILL] {
        for process in others.iter().chain([&pid]) {
            // SAFETY: processes of this test's own daemon.
            unsafe { libc::kill(*process as i32, signal) };
        }
    }
    daemon.kill();
    until_ended(&others);
}

/// A thread of a process, as /proc tells of it.
pub(crate) struct Thread {
    /// Its folder.
    pub(crate) path: PathBuf,
    status: String,
}

impl Thread {
    /// What it calls itself.
    pub(crate) fn name(&self) -> String {
        self.field("Name")
    }

    /// A field of its `status`, with single spaces between its words.
    #[track_caller]
    pub(crate) fn field(&self, name: &str) -> String {
        let line = self.status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let line = line.unwrap_or_else(|| panic!("no {name} in:\n{}", self.status));
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

/// The threads of a process that live. One that ends while this looks is left out, because what the
/// kernel still says of it has holes.
pub(crate) fn threads(pid: u32) -> Vec<Thread> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let living = tasks.filter_map(|task| {
        let path = task.unwrap().path();
        let status = match std::fs::read_to_string(path.join("status")) {
            Err(e) if e.kind() == ErrorKind::NotFound => return None,
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => return None,
            status => status.unwrap(),
        };
        let thread = Thread { path, status };
        let dead = thread.field("State").starts_with(['X', 'Z']) || !thread.path.exists();
        (!dead).then_some(thread)
    });
    living.collect()
}

/// Runs the program in a folder: its status, and words that it says.
#[track_caller]
pub(crate) fn says(dir: &Path, args: &[&str], status: i32, words: &[&str]) -> String {
    let mut command = ringway();
    command.args(args).current_dir(dir);
    let output = run(command);
    let said = text(&output.stdout) + &text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{args:?}: {said}");
    for word in words {
        assert!(said.contains(word), "{args:?} does not say {word:?}: {said}");
    }
    said
}

/// What is in a folder.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Two authorities; of the first, certificates of a server and a client, and one that expires at once.
const CERTIFICATES: &str = "
new='-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes'
for ca in ca other; do
  openssl req -x509 $new -keyout $ca-key.pem -out $ca-cert.pem -days 30 -subj /CN=$ca \\
    -addext keyUsage=critical,keyCertSign
done
for who in server client; do
  printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\\nkeyUsage=critical,digitalSignature,keyEncipherment\\nextendedKeyUsage=%sAuth\\n' $who > $who.ext
  openssl req $new -keyout $who-key.pem -out $who.csr -subj /CN=$who
  openssl x509 -req -in $who.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 30 \\
    -extfile $who.ext -out $who-cert.pem
done
openssl x509 -req -in server.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 0 \\
  -extfile server.ext -out expired-cert.pem
mkdir full bare wrong garbage server expired
cp ca-cert.pem server-cert.pem server-key.pem server
mv expired-cert.pem expired/server-cert.pem
cp ca-key.pem garbage/ca-cert.pem
cp ca-cert.pem client-cert.pem client-key.pem full
cp ca-cert.pem bare
cp other-cert.pem wrong/ca-cert.pem
";

/// Makes certificates in a folder, and folders as clients and servers have them; false if there is no program
/// for it.
pub(crate) fn authorities(dir: &Path) -> bool {
    if Command::new("openssl").arg("version").output().is_err() {
        return false;
    }
    let mut command = Command::new("sh");
    command.args(["-ec", CERTIFICATES]).current_dir(dir);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    true
}
