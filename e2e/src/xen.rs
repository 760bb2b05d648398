//! A real Xen host under QEMU: dom0 with its toolstack and `ringway serve --xen`, and in it a real
//! guest with the stock front-end.
//!
//! ```no_run
//! use ringway_e2e::xen::Machine;
//! # fn main() -> anyhow::Result<()> {
//! if let Some(running) = Machine::new("rounds").boot()? {
//!     running.finish()?.expect_ok();
//! }
//! # Ok(()) }
//! ```
//!
//! `xen/build.sh` makes it of Debian packages; `xen/scenarios/` has what runs in dom0. It judges by
//! itself and prints `RINGWAY CHECK` lines, as other guests do (see [`crate::guest`]).

use ringway_testkit::{Need, skip};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::guest::{Running, qemu, ringway_program, target_dir};

/// Memory of dom0, and of the whole machine, in MiB.
const DOM0_MIB: u32 = 704;
const MACHINE_MIB: u32 = 1344;

/// `build.sh` says so where it lacks what it needs.
const UNFIT: i32 = 77;

/// The same with everything that `build.sh speed` adds, and room for the disks.
const SPEED_DOM0_MIB: u32 = 1100;
const SPEED_MACHINE_MIB: u32 = 2048;

/// A Xen host to boot.
#[derive(Debug, Clone)]
pub struct Machine {
    scenario: String,
    params: Vec<(String, String)>,
    limit: Duration,
    program: Option<PathBuf>,
    measures: bool,
    real_time: bool,
}

impl Machine {
    /// A machine that runs `xen/scenarios/SCENARIO.sh` in dom0.
    pub fn new(scenario: &str) -> Self {
        Self {
            scenario: scenario.to_owned(),
            params: Vec::new(),
            limit: Duration::from_secs(480),
            program: None,
            measures: false,
            real_time: true,
        }
    }

    /// The `ringway` that runs in dom0, if it is not the one of the target directory.
    pub fn program(mut self, program: &Path) -> Self {
        self.program = Some(program.to_owned());
        self
    }

    /// For measuring: other back-ends in dom0, and fio in the guest. Unless `real_time` says otherwise,
    /// the machine's time is what it does: each instruction takes a nanosecond, and nothing takes
    /// none. What else runs on this computer makes no difference then.
    pub fn measures(mut self, real_time: bool) -> Self {
        (self.measures, self.real_time) = (true, real_time);
        self
    }

    /// How long it may take, the build not included.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// A parameter for the scenario: no spaces.
    pub fn param(mut self, key: &str, value: impl ToString) -> Self {
        self.params.push((key.to_owned(), value.to_string()));
        self
    }

    /// Builds the machine if needed, waits for other guests to end, and starts QEMU. `None`, with the
    /// reason said, where there is no QEMU, or where Xen cannot be had.
    pub fn boot(self) -> Result<Option<Running>> {
        let qemu = match qemu() {
            Ok(qemu) => qemu,
            Err(error) => {
                skip(Need::Qemu, format_args!("{error:#}"));
                return Ok(None);
            }
        };
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("xen/build.sh");
        let out = target_dir().join(if self.measures { "xen-speed" } else { "xen" });
        let program = match self.program {
            Some(program) => program,
            None => ringway_program()?,
        };
        let mut build = Command::new(&script);
        build.arg(&out).arg(program).arg(disk_check()?).stdin(Stdio::null());
        if self.measures {
            build.arg("speed");
        }
        let output = build.output();
        let output = output.with_context(|| format!("start {}", script.display()))?;
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.code() == Some(UNFIT) {
            skip(Need::Xen, said);
            return Ok(None);
        }
        ensure!(output.status.success(), "the Xen host could not be built:\n{said}");

        let mut command = Command::new(&qemu.program);
        // One CPU: Xen on emulated ones is at times very slow with more.
        command.args("-cpu qemu64 -smp 1 -nodefaults".split(' '));
        if self.real_time {
            command.args("-accel tcg,thread=multi".split(' '));
        } else {
            command.args("-accel tcg,thread=single -icount shift=0,sleep=off".split(' '));
        }
        command.args("-no-user-config -display none -serial stdio -no-reboot".split(' '));
        let (machine_mib, dom0_mib) = if self.measures {
            (SPEED_MACHINE_MIB, SPEED_DOM0_MIB)
        } else {
            (MACHINE_MIB, DOM0_MIB)
        };
        command.args(["-m", &machine_mib.to_string()]);
        command.arg("-kernel").arg(out.join("xen"));
        // An emulated CPU guesses nothing; what guards against it is dear there.
        command.arg("-append").arg(format!(
            "console=com1 com1=115200,8n1 dom0_mem={dom0_mib}M,max:{dom0_mib}M loglvl=warning \
             guest_loglvl=warning spec-ctrl=no"
        ));
        let mut words = format!(
            "console=hvc0 panic=-1 quiet mitigations=off ringway.scenario={}",
            self.scenario
        );
        for (key, value) in &self.params {
            words.push_str(&format!(" ringway.{key}={value}"));
        }
        let (kernel, initrd) = (out.join("vmlinuz"), out.join("dom0.cpio"));
        // QEMU takes a comma for the end of a module.
        ensure!(!out.to_string_lossy().contains(','), "{} holds a comma", out.display());
        command.arg("-initrd");
        command.arg(format!("{} {words},{}", kernel.display(), initrd.display()));
        Running::start(command, format!("xen-{}", self.scenario), self.limit).map(Some)
    }
}

/// The program that runs in guests, which cargo builds with the tests of this crate.
fn disk_check() -> Result<PathBuf> {
    let program = target_dir().join("disk-check");
    ensure!(
        program.is_file(),
        "{} does not exist: run `cargo build -p ringway-e2e` in the same profile first",
        program.display()
    );
    Ok(program)
}
