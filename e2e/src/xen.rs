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

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::guest::{Running, qemu, ringway_program, target_dir};

/// Memory of dom0, and of the whole machine, in MiB.
const DOM0_MIB: u32 = 704;
const MACHINE_MIB: u32 = 1344;

/// `build.sh` says so where it lacks what it needs.
const UNFIT: i32 = 77;

/// A Xen host to boot.
#[derive(Debug, Clone)]
pub struct Machine {
    scenario: String,
    params: Vec<(String, String)>,
    limit: Duration,
}

impl Machine {
    /// A machine that runs `xen/scenarios/SCENARIO.sh` in dom0.
    pub fn new(scenario: &str) -> Self {
        let (scenario, params) = (scenario.to_owned(), Vec::new());
        Self { scenario, params, limit: Duration::from_secs(480) }
    }

    /// A parameter for the scenario: no spaces.
    pub fn param(mut self, key: &str, value: impl ToString) -> Self {
        self.params.push((key.to_owned(), value.to_string()));
        self
    }

    /// Builds the machine if needed, waits for other guests to end, and starts QEMU. `None`, with the
    /// reason on stderr, where there is no QEMU, or where Xen cannot be had.
    pub fn boot(self) -> Result<Option<Running>> {
        let qemu = match qemu() {
            Ok(qemu) => qemu,
            Err(error) => {
                eprintln!("skipped: {error:#}");
                return Ok(None);
            }
        };
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("xen/build.sh");
        let out = target_dir().join("xen");
        let mut build = Command::new(&script);
        let output = build.arg(&out).arg(ringway_program()?).stdin(Stdio::null()).output();
        let output = output.with_context(|| format!("start {}", script.display()))?;
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.code() == Some(UNFIT) {
            eprintln!("skipped: {}", said.trim_end());
            return Ok(None);
        }
        ensure!(output.status.success(), "the Xen host could not be built:\n{said}");

        let mut command = Command::new(&qemu.program);
        // One CPU: Xen on emulated ones is at times very slow with more.
        command.args("-accel tcg,thread=multi -cpu qemu64 -smp 1 -nodefaults".split(' '));
        command.args("-no-user-config -display none -serial stdio -no-reboot".split(' '));
        command.args(["-m", &MACHINE_MIB.to_string()]);
        command.arg("-kernel").arg(out.join("xen"));
        command.arg("-append").arg(format!(
            "console=com1 com1=115200,8n1 dom0_mem={DOM0_MIB}M,max:{DOM0_MIB}M loglvl=warning \
             guest_loglvl=warning"
        ));
        let mut words = format!("console=hvc0 panic=-1 quiet ringway.scenario={}", self.scenario);
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
