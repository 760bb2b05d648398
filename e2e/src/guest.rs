//! Real Linux guests under QEMU, with a disk served by `ringway serve`.
//!
//! ```no_run
//! use ringway_e2e::guest::{Daemon, Disk, Guest, Serve};
//! # fn main() -> anyhow::Result<()> {
//! let daemon = Daemon::serve(&Serve::new("disk.img", "v.sock").queues(4))?;
//! let report = Guest::new("full").disk(Disk::new(daemon.socket()).queues(4)).boot()?.finish()?;
//! report.expect_ok();
//! daemon.stop()?;
//! # Ok(()) }
//! ```
//!
//! The guest is made of Debian packages by `guest/build.sh` and runs one scenario of
//! `guest/scenarios/`.  It judges by itself and prints `RINGWAY CHECK` lines; `guest/lib.sh`
//! describes them.  Consoles are kept in `guest-logs` of the target directory.
//!
//! QEMU runs without KVM, so a test needs no privileges.  Guests wait for each other: one already
//! fills a small machine.
//!
//! # Environment
//! - `RINGWAY_SKIP_GUEST=reason`: guest tests return at once and print the reason.
//! - `RINGWAY_BIN`: the `ringway` program, if it is not in the target directory.
//! - `RINGWAY_E2E_SERVER=qemu-storage-daemon`: the control: the same guest against QEMU's server.
//! - `RINGWAY_QEMU`: QEMU, if it is not `qemu-system-x86_64` in the search path.
//! - `RINGWAY_GUEST_CACHE`, `RINGWAY_GUEST_KERNEL`: see `guest/build.sh`.

use crate::files;
pub use crate::files::{GuestFiles, NewerQemu, guest_files, newer_qemu, target_dir};
use ringway_testkit::{Need, skip};
use rustix::fs::{FlockOperation, flock};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};

/// How many of the last console lines a failure shows.
const TAIL: usize = 40;

/// The stated reason to leave out guest tests (`RINGWAY_SKIP_GUEST`), already printed.
pub fn skip_reason() -> Option<String> {
    let reason = std::env::var("RINGWAY_SKIP_GUEST").ok()?;
    if reason.is_empty() || reason == "0" {
        return None;
    }
    skip(Need::Guest, format_args!("RINGWAY_SKIP_GUEST={reason}"));
    Some(reason)
}

// ---------------------------------------------------------------------------------------------
// The server

/// One disk to serve: what `ringway serve` is asked for.
#[derive(Debug, Clone)]
pub struct Serve {
    image: PathBuf,
    socket: PathBuf,
    queues: u16,
    read_only: bool,
    serial: Option<String>,
    more: Vec<OsString>,
}

impl Serve {
    /// Serves `image` on the vhost-user socket `socket`, writable, with one queue.
    pub fn new(image: impl Into<PathBuf>, socket: impl Into<PathBuf>) -> Self {
        let (image, socket) = (image.into(), socket.into());
        Self { image, socket, queues: 1, read_only: false, serial: None, more: Vec::new() }
    }

    /// Number of request queues.
    pub fn queues(mut self, queues: u16) -> Self {
        self.queues = queues;
        self
    }

    /// Refuses writes.
    pub fn read_only(mut self) -> Self {
        self.read_only = true;
        self
    }

    /// Serial number the guest sees (at most 20 bytes).
    pub fn serial(mut self, serial: &str) -> Self {
        self.serial = Some(serial.to_owned());
        self
    }

    /// One more argument for `ringway serve`; the control ignores it.
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.more.push(arg.into());
        self
    }

    fn ringway(&self) -> Result<Command> {
        let mut command = Command::new(ringway_program()?);
        command.arg("serve").arg(&self.image).arg("--socket").arg(&self.socket);
        command.arg("--queues").arg(self.queues.to_string());
        if self.read_only {
            command.arg("--read-only");
        }
        if let Some(serial) = &self.serial {
            command.arg("--serial").arg(serial);
        }
        command.args(&self.more);
        Ok(command)
    }

    fn control(&self) -> Command {
        let on_off = |on| if on { "on" } else { "off" };
        let mut command = Command::new("qemu-storage-daemon");
        command.arg("--blockdev").arg(format!(
            "driver=file,filename={},node-name=disk,discard=unmap,read-only={}",
            self.image.display(),
            on_off(self.read_only),
        ));
        command.args(["--object", "iothread,id=thread0", "--export"]).arg(format!(
            "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={},\
             writable={},num-queues={},iothread=thread0",
            self.socket.display(),
            on_off(!self.read_only),
            self.queues,
        ));
        command
    }
}

/// `RINGWAY_BIN`, or `ringway` in the target directory this test was built in.
pub fn ringway_program() -> Result<PathBuf> {
    if let Some(program) = std::env::var_os("RINGWAY_BIN") {
        return Ok(program.into());
    }
    let program = target_dir().join("ringway");
    ensure!(
        program.is_file(),
        "{} does not exist: run `cargo build` first, or name the program in RINGWAY_BIN",
        program.display()
    );
    Ok(program)
}

/// Whether `RINGWAY_E2E_SERVER` asks for the control instead of Ringway.  Where the two differ
/// by design, a test may have to know: QEMU's server reports no write cache and has a fixed
/// serial number.
pub fn server_is_control() -> bool {
    std::env::var_os("RINGWAY_E2E_SERVER").is_some_and(|server| server == "qemu-storage-daemon")
}

/// A running server of one disk.  Dropping it kills it.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    socket: PathBuf,
    log: PathBuf,
}

impl Daemon {
    /// Starts `ringway serve` (or the control, see the module's head) and waits for its socket.
    /// The process dies with the calling thread.
    pub fn serve(serve: &Serve) -> Result<Self> {
        let mut command = if server_is_control() { serve.control() } else { serve.ringway()? };
        let log = serve.socket.with_extension("server.log");
        let output = File::create(&log).with_context(|| format!("create {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        die_with_us(&mut command);
        let child = command.spawn().with_context(|| {
            format!(
                "start {} (Debian: qemu-system-common has qemu-storage-daemon)",
                command.get_program().to_string_lossy()
            )
        })?;
        let mut daemon = Self { child, socket: serve.socket.clone(), log };
        daemon.wait_until_listening()?;
        Ok(daemon)
    }

    /// A probing connection would be taken for a client, so the kernel's table is asked.
    fn wait_until_listening(&mut self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut seen = None;
        loop {
            if let Some(status) = self.child.try_wait()? {
                bail!("the server ended with {status} before it was ready:\n{}", self.output());
            }
            if is_listening(&self.socket) {
                return Ok(());
            }
            // A socket that was renamed into place has another name in the table.
            let is_there =
                self.socket.symlink_metadata().is_ok_and(|found| found.file_type().is_socket());
            if is_there && seen.get_or_insert_with(Instant::now).elapsed().as_millis() > 500 {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "no server on {} after a minute:\n{}",
                self.socket.display(),
                self.output()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Path of the vhost-user socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Process id, for tests that look into the process or signal it.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// `ringway ctl ARGS` against the control socket `control`, which the daemon was given with
    /// [`Serve::arg`]: what it printed.
    pub fn ctl(control: &Path, args: &[&str]) -> Result<String> {
        let mut command = Command::new(ringway_program()?);
        let output = command.arg("ctl").arg("--control").arg(control).args(args).output()?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        ensure!(output.status.success(), "ringway ctl {args:?}: {}", text(&output.stderr));
        Ok(text(&output.stdout))
    }

    /// What the server has printed so far, standard output and error together.
    pub fn output(&self) -> String {
        let bytes = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// SIGKILL, and waits for the end.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// SIGTERM.  The server drains, and must exit with status 0.
    pub fn stop(mut self) -> Result<()> {
        let pid = libc::pid_t::try_from(self.child.id())?;
        // SAFETY: our own child, not yet waited for, so the id is still its own.
        ensure!(unsafe { libc::kill(pid, libc::SIGTERM) } == 0, "kill: the server is gone");
        let status = wait_for(&mut self.child, Duration::from_secs(60))?
            .ok_or_else(|| anyhow!("still running a minute after SIGTERM:\n{}", self.output()))?;
        ensure!(status.success(), "the server ended with {status}:\n{}", self.output());
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        kill_and_wait(&mut self.child);
    }
}

fn is_listening(socket: &Path) -> bool {
    // Num RefCount Protocol Flags Type St Inode Path; flag 0x10000 is set by listen().
    let table = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let path = socket.to_string_lossy();
    table.lines().any(|line| {
        let mut words = line.split_whitespace();
        words.nth(3) == Some("00010000") && words.nth(3) == Some(&*path)
    })
}

// ---------------------------------------------------------------------------------------------
// The guest

/// One vhost-user disk of a guest: `/dev/vda` is the first, `/dev/vdb` the second.
#[derive(Debug, Clone)]
pub struct Disk {
    socket: PathBuf,
    queues: u16,
    packed: bool,
    reconnect: bool,
    behind_iommu: bool,
    ats: bool,
}

impl Disk {
    /// A disk behind this vhost-user socket, one queue, split rings.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            queues: 1,
            packed: false,
            reconnect: false,
            behind_iommu: false,
            ats: true,
        }
    }

    /// Number of queues; the server must offer as many.
    pub fn queues(mut self, queues: u16) -> Self {
        self.queues = queues;
        self
    }

    /// Asks for packed rings.  QEMU falls back to split ones silently: look at
    /// `report.info("vda.packed")`.
    pub fn packed(mut self) -> Self {
        self.packed = true;
        self
    }

    /// Puts it behind a virtual IOMMU (intel-iommu) with a translation cache of its own, on a PCIe
    /// port: only there it has ATS, and no legacy interface.
    pub fn behind_iommu(mut self) -> Self {
        self.behind_iommu = true;
        self
    }

    /// Without that cache.
    pub fn without_ats(mut self) -> Self {
        self.ats = false;
        self
    }

    /// Lets QEMU connect again, about a second after the server went away.
    pub fn reconnect(mut self) -> Self {
        self.reconnect = true;
        self
    }
}

/// A guest to boot.
#[derive(Debug, Clone)]
pub struct Guest {
    scenario: String,
    name: String,
    vcpus: u16,
    memory_mib: u32,
    disks: Vec<Disk>,
    params: Vec<(String, String)>,
    qemu_args: Vec<OsString>,
    kernel_args: Vec<String>,
    from_disk: bool,
    limit: Duration,
    qemu: Option<PathBuf>,
}

impl Guest {
    /// A guest that runs `guest/scenarios/SCENARIO.sh`: 4 vCPUs, 512 MiB, 300 s.
    pub fn new(scenario: &str) -> Self {
        Self {
            scenario: scenario.to_owned(),
            name: scenario.to_owned(),
            vcpus: 4,
            memory_mib: 512,
            disks: Vec::new(),
            params: Vec::new(),
            qemu_args: Vec::new(),
            kernel_args: Vec::new(),
            from_disk: false,
            limit: Duration::from_secs(300),
            qemu: None,
        }
    }

    /// Name of the log file, if the scenario's name is not good enough.
    pub fn name(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    /// Number of virtual CPUs.
    pub fn vcpus(mut self, vcpus: u16) -> Self {
        self.vcpus = vcpus;
        self
    }

    /// Guest memory in MiB; about 200 go to the kernel and the initramfs.
    pub fn memory_mib(mut self, mib: u32) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Adds a disk.
    pub fn disk(mut self, disk: Disk) -> Self {
        self.disks.push(disk);
        self
    }

    /// A parameter for the scenario: `ringway.KEY=VALUE` on the kernel command line, no spaces.
    pub fn param(mut self, key: &str, value: impl ToString) -> Self {
        self.params.push((key.to_owned(), value.to_string()));
        self
    }

    /// One more word on the kernel command line.
    pub fn kernel_arg(mut self, arg: &str) -> Self {
        self.kernel_args.push(arg.to_owned());
        self
    }

    /// One more argument for QEMU.
    pub fn qemu_arg(mut self, arg: impl Into<OsString>) -> Self {
        self.qemu_args.push(arg.into());
        self
    }

    /// Lets the firmware (SeaBIOS) start it from its first disk, as which `image` is made: 256 MiB, of which
    /// the first `mib` are a file system with boot loader, kernel and scenario. To be called when all else
    /// is said.
    pub fn from_disk(mut self, image: &Path, mib: u32) -> Result<Self> {
        files::boot_disk(image, mib, &self.kernel_line())?;
        self.from_disk = true;
        Ok(self)
    }

    /// Time from QEMU's start to its end.  Ten seconds earlier the guest itself gives up and
    /// prints what it hangs on.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Runs in this QEMU instead of the machine's.
    pub fn qemu(mut self, program: &Path) -> Self {
        self.qemu = Some(program.to_owned());
        self
    }

    /// Builds the guest if needed, waits for other guests to end, and starts QEMU.  The guest
    /// dies with the calling thread.
    pub fn boot(self) -> Result<Running> {
        let command = self.command(guest_files()?)?;
        Running::start(command, self.name, self.limit)
    }

    /// As [`Guest::boot`], beside the guest whose turn it is: for the destination of a migration.
    pub fn boot_beside(self, _whose_turn: &Running) -> Result<Running> {
        let command = self.command(guest_files()?)?;
        Running::start_now(command, self.name, self.limit, None)
    }

    fn command(&self, files: &GuestFiles) -> Result<Command> {
        let other = self.qemu.as_ref().map(|program| Qemu::at(program.into())).transpose()?;
        let qemu: &Qemu = match &other {
            Some(other) => other,
            None => qemu()?,
        };
        let memory = self.memory_mib;
        let mut command = Command::new(&qemu.program);
        command.args("-accel tcg,thread=multi -cpu max -nodefaults -no-user-config".split(' '));
        command.args("-display none -serial stdio -no-reboot".split(' '));
        command.args(["-m", &memory.to_string(), "-smp", &self.vcpus.to_string()]);
        // vhost-user needs guest memory it can map.
        command
            .arg("-object")
            .arg(format!("memory-backend-memfd,id=memory,size={memory}M,share=on"))
            .args(["-machine", "q35,memory-backend=memory"]);
        if let Some(disk) = self.disks.iter().find(|disk| disk.behind_iommu) {
            // Before the devices that are behind it.
            let cache = if disk.ats { ",device-iotlb=on" } else { "" };
            command.arg("-device").arg(format!("intel-iommu,intremap=off{cache}"));
        }
        for (n, disk) in self.disks.iter().enumerate() {
            let reconnect = if disk.reconnect { qemu.reconnect_option() } else { "" };
            command
                .arg("-chardev")
                .arg(format!("socket,id=socket{n},path={}{reconnect}", disk.socket.display()));
            let packed = if disk.packed { ",packed=on" } else { "" };
            let iommu = match disk.behind_iommu {
                true => {
                    command
                        .arg("-device")
                        .arg(format!("pcie-root-port,id=port{n},chassis={}", n + 1));
                    let ats = if disk.ats { ",ats=on" } else { "" };
                    format!(",bus=port{n},iommu_platform=on{ats}")
                }
                false => String::new(),
            };
            let first = if self.from_disk && n == 0 { ",bootindex=0" } else { "" };
            command.arg("-device").arg(format!(
                "vhost-user-blk-pci,id=disk{n},chardev=socket{n},num-queues={}{packed}{iommu}{first}",
                disk.queues
            ));
        }
        if !self.from_disk {
            command.arg("-kernel").arg(&files.kernel).arg("-initrd").arg(&files.initrd);
            command.arg("-append").arg(self.kernel_line());
        }
        command.args(&self.qemu_args);
        Ok(command)
    }

    /// What the kernel is told.
    fn kernel_line(&self) -> String {
        let guest_limit = self.limit.as_secs().saturating_sub(10).max(5);
        // On a busy host a guest without KVM may see no tick of its timer in time, and panic for that.
        let mut line = format!(
            "console=ttyS0 quiet panic=-1 no_timer_check ringway.scenario={} ringway.timeout={guest_limit}",
            self.scenario
        );
        if self.disks.iter().any(|disk| disk.behind_iommu) {
            line.push_str(" intel_iommu=on");
        }
        for word in &self.kernel_args {
            line.push_str(&format!(" {word}"));
        }
        for (key, value) in &self.params {
            line.push_str(&format!(" ringway.{key}={value}"));
        }
        line
    }
}

/// Waits for other guests to end. Theirs is the next turn when this is dropped.
pub fn turn() -> Result<File> {
    let turn = File::create(logs()?.join("turn.lock"))?;
    flock(&turn, FlockOperation::LockExclusive).context("wait for other guests")?;
    Ok(turn)
}

/// A guest that is running.  Dropping it kills it.
#[derive(Debug)]
pub struct Running {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    deadline: Instant,
    limit: Duration,
    report: Report,
    /// Released when the guest is gone: the next guest's turn.
    turn: Option<File>,
}

impl Running {
    /// Waits for other guests to end, and starts QEMU.
    pub(crate) fn start(command: Command, name: String, limit: Duration) -> Result<Self> {
        Self::start_now(command, name, limit, Some(turn()?))
    }

    fn start_now(
        mut command: Command,
        name: String,
        limit: Duration,
        turn: Option<File>,
    ) -> Result<Self> {
        let logs = logs()?;
        let log_path = logs.join(format!("{name}.log"));
        let log = File::create(&log_path).with_context(|| log_path.display().to_string())?;
        writeln!(&log, "{command:?}\n")?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        die_with_us(&mut command);
        let mut child = command.spawn().context("start QEMU")?;

        let (sender, lines) = channel();
        let log = Arc::new(Mutex::new(log));
        let stdin = child.stdin.take().context("stdin")?;
        let stdout = child.stdout.take().context("stdout")?;
        let stderr = child.stderr.take().context("stderr")?;
        stream(stdout, "", sender.clone(), Arc::clone(&log));
        stream(stderr, "qemu: ", sender, log);
        Ok(Self {
            child,
            stdin,
            lines,
            deadline: Instant::now() + limit,
            limit,
            report: Report::new(name, log_path),
            turn,
        })
    }

    /// Runs to the end, answering each question of the guest with `ok`.
    pub fn finish(self) -> Result<Report> {
        self.finish_with(|_| "ok".to_owned())
    }

    /// Runs to the end.  `answer` gets the name of each question (`ask NAME` in a scenario) at the
    /// moment the guest waits for it, and returns one line.
    pub fn finish_with(mut self, mut answer: impl FnMut(&str) -> String) -> Result<Report> {
        while let Some(line) = self.next_line()? {
            if let Some(question) = words_after(&line, "ASK") {
                let reply = answer(question.trim());
                self.send_line(&reply)?;
            }
        }
        let left = self.deadline.saturating_duration_since(Instant::now());
        let status = wait_for(&mut self.child, left)?
            .ok_or_else(|| anyhow!("QEMU closed its console and did not end"))?;
        if !status.success() {
            bail!("QEMU ended with {status}; {}", self.report.tail());
        }
        Ok(std::mem::take(&mut self.report))
    }

    /// Waits until a console line contains `text`, for tests that act while the guest works.
    pub fn wait_for_line(&mut self, text: &str) -> Result<String> {
        while let Some(line) = self.next_line()? {
            if line.contains(text) {
                return Ok(line);
            }
        }
        bail!("the guest ended before it said {text:?}; {}", self.report.tail());
    }

    /// Types one line on the guest's console, as an answer to `ask` in a scenario.
    pub fn send_line(&mut self, line: &str) -> Result<()> {
        writeln!(self.stdin, "{line}").context("write to the guest's console")
    }

    /// Ends QEMU, whose guest goes on at `to` now, and with it the turn.
    pub fn gone_to(mut self, to: &mut Self) {
        kill_and_wait(&mut self.child);
        to.turn = self.turn.take();
    }

    /// QEMU's process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next console line, noted in the report; `None` when QEMU has closed the console.
    fn next_line(&mut self) -> Result<Option<String>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match self.lines.recv_timeout(left) {
            Ok(line) => {
                self.report.note(&line);
                Ok(Some(line))
            }
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => {
                kill_and_wait(&mut self.child);
                bail!("the guest took more than {:?}; {}", self.limit, self.report.tail())
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        kill_and_wait(&mut self.child);
    }
}

fn logs() -> Result<PathBuf> {
    let logs = target_dir().join("guest-logs");
    std::fs::create_dir_all(&logs)?;
    Ok(logs)
}

/// Copies a guest's or QEMU's output, line by line, to the log and to the test.
fn stream(
    from: impl Read + Send + 'static,
    prefix: &'static str,
    to: Sender<String>,
    log: Arc<Mutex<File>>,
) {
    std::thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut bytes = Vec::new();
        while from.read_until(b'\n', &mut bytes).is_ok_and(|n| n > 0) {
            let line = format!("{prefix}{}", String::from_utf8_lossy(&bytes).trim_end());
            bytes.clear();
            if let Ok(mut log) = log.lock() {
                // A full disk must not hide the test's own verdict.
                let _ = writeln!(log, "{line}");
            }
            // The test may have stopped listening; the log goes on.
            let _ = to.send(line);
        }
    });
}

// ---------------------------------------------------------------------------------------------
// The report

/// One judgement of the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// What was judged.
    pub name: String,
    /// The judgement.
    pub ok: bool,
    /// Why, or what was seen.
    pub detail: String,
}

/// What a guest said.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Judgements, in order.
    pub checks: Vec<Check>,
    /// Facts, for the host to judge.
    pub infos: BTreeMap<String, String>,
    /// The scenario ran to its end.
    pub done: bool,
    /// The whole console.
    pub log: PathBuf,
    name: String,
    lines: Vec<String>,
}

impl Report {
    fn new(name: String, log: PathBuf) -> Self {
        Self { name, log, ..Self::default() }
    }

    fn note(&mut self, line: &str) {
        self.lines.push(line.to_owned());
        if let Some(rest) = words_after(line, "CHECK") {
            let mut words = rest.splitn(3, ' ');
            self.checks.push(Check {
                name: words.next().unwrap_or_default().to_owned(),
                ok: words.next() == Some("ok"),
                detail: words.next().unwrap_or_default().trim().to_owned(),
            });
        } else if let Some(rest) = words_after(line, "INFO") {
            let (key, value) = rest.split_once(' ').unwrap_or((rest, ""));
            self.infos.insert(key.to_owned(), value.trim().to_owned());
        } else if words_after(line, "DONE").is_some() {
            self.done = true;
        }
    }

    /// A fact the guest told.  Panics if it did not.
    #[track_caller]
    pub fn info(&self, key: &str) -> &str {
        match self.infos.get(key) {
            Some(value) => value,
            None => panic!("the guest did not tell {key}; {}", self.tail()),
        }
    }

    /// Facts whose key starts with `prefix`, for comparing two boots.
    pub fn infos_with(&self, prefix: &str) -> BTreeMap<&str, &str> {
        let found = self.infos.iter().filter(|(key, _)| key.starts_with(prefix));
        found.map(|(key, value)| (&**key, &**value)).collect()
    }

    /// Panics, with the end of the console, unless the scenario ended and every check was ok.
    #[track_caller]
    pub fn expect_ok(&self) {
        assert!(self.checks.iter().all(|check| check.ok), "failed in the guest; {}", self.tail());
        assert!(self.done, "the guest ended early; {}", self.tail());
        assert!(!self.checks.is_empty(), "the guest judged nothing; {}", self.tail());
    }

    /// The end of the console and the failed checks, for failure messages.
    pub fn tail(&self) -> String {
        let from = self.lines.len().saturating_sub(TAIL);
        let mut text = format!(
            "last console lines of guest {:?} (all in {}):\n{}",
            self.name,
            self.log.display(),
            self.lines[from..].join("\n")
        );
        for check in self.checks.iter().filter(|check| !check.ok) {
            text.push_str(&format!("\nfailed check {}: {}", check.name, check.detail));
        }
        text
    }
}

/// `line` after "RINGWAY VERB".  The firmware or the kernel may have left something before it.
fn words_after<'a>(line: &'a str, verb: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once("RINGWAY ")?;
    let rest = rest.strip_prefix(verb)?;
    if rest.is_empty() { Some(rest) } else { rest.strip_prefix(' ') }
}

// ---------------------------------------------------------------------------------------------
// QEMU, the guest's files, processes

#[derive(Debug)]
pub(crate) struct Qemu {
    pub(crate) program: OsString,
    version: (u32, u32),
}

impl Qemu {
    fn at(program: OsString) -> Result<Self> {
        let output = Command::new(&program).arg("--version").output().with_context(|| {
            format!(
                "start {}: guest tests need QEMU (Debian: qemu-system-x86); \
                 RINGWAY_SKIP_GUEST=reason leaves them out",
                program.to_string_lossy()
            )
        })?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let version = parse_version(&text).with_context(|| format!("no version in {text:?}"))?;
        Ok(Self { program, version })
    }

    /// One second between attempts; milliseconds since 9.2, where the older word is deprecated.
    fn reconnect_option(&self) -> &'static str {
        if self.version >= (9, 2) { ",reconnect-ms=1000" } else { ",reconnect=1" }
    }
}

pub(crate) fn qemu() -> Result<&'static Qemu> {
    static QEMU: OnceLock<Result<Qemu, String>> = OnceLock::new();
    let found = QEMU.get_or_init(|| {
        let program = std::env::var_os("RINGWAY_QEMU").unwrap_or("qemu-system-x86_64".into());
        Qemu::at(program).map_err(|error| format!("{error:#}"))
    });
    found.as_ref().map_err(|error| anyhow!("{error}"))
}

/// "QEMU emulator version 7.2.22 (Debian …)" → (7, 2)
fn parse_version(text: &str) -> Option<(u32, u32)> {
    let (_, rest) = text.split_once("version ")?;
    let mut numbers = rest.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// The child gets SIGKILL when the thread that starts it ends, however that happens.
fn die_with_us(command: &mut Command) {
    // SAFETY: prctl is one system call: it is allowed between fork and exec, and allocates nothing.
    unsafe {
        command.pre_exec(|| {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) == 0 {
                Ok(())
            } else {
                Err(std::io::Error::last_os_error())
            }
        });
    }
}

fn wait_for(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Both calls do nothing harmful to a child that has already been waited for.
fn kill_and_wait(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_guest_are_understood() {
        let mut report = Report::new("t".into(), PathBuf::new());
        for line in [
            "junk before RINGWAY CHECK mount ok ",
            "RINGWAY CHECK write_cache FAIL wanted 'a b', found 'c'",
            "RINGWAY INFO vda.mq 0 1 2 3",
            "RINGWAY INFO empty ",
            "RINGWAY CHECKED nothing",
        ] {
            report.note(line);
        }
        let check =
            |name: &str, ok, detail: &str| Check { name: name.into(), ok, detail: detail.into() };
        assert_eq!(
            report.checks,
            [check("mount", true, ""), check("write_cache", false, "wanted 'a b', found 'c'")]
        );
        assert_eq!(report.info("vda.mq"), "0 1 2 3");
        assert_eq!(report.info("empty"), "");
        assert!(!report.done);
        report.note("RINGWAY DONE");
        assert!(report.done);
    }

    #[test]
    #[should_panic(expected = "failed in the guest")]
    fn a_failed_check_fails_the_report() {
        let mut report = Report::new("t".into(), PathBuf::new());
        report.note("RINGWAY CHECK one FAIL");
        report.note("RINGWAY DONE");
        report.expect_ok();
    }

    #[test]
    #[should_panic(expected = "ended early")]
    fn a_guest_that_ends_early_fails_the_report() {
        let mut report = Report::new("t".into(), PathBuf::new());
        report.note("RINGWAY CHECK one ok");
        report.expect_ok();
    }

    #[test]
    fn reconnect_is_spelled_as_this_qemu_wants_it() {
        let option = |text| {
            let version = parse_version(text).unwrap();
            Qemu { program: OsString::new(), version }.reconnect_option()
        };
        assert_eq!(option("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)"), ",reconnect=1");
        assert_eq!(option("QEMU emulator version 10.0.2\n"), ",reconnect-ms=1000");
    }
}
