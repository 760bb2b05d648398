//! Programs for a guest, with all that they need.

use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs a command that must succeed: what it printed.
pub(crate) fn printed(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}, {error}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Copies a program to `root/bin`, and the libraries it needs to where it looks for them.
fn carry(program: &Path, root: &Path) -> Result<()> {
    let name = program.file_name().context("a program has a name")?;
    std::fs::create_dir_all(root.join("bin"))?;
    std::fs::copy(program, root.join("bin").join(name))?;
    let libraries = printed(Command::new("ldd").arg(program))?;
    for library in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
        let to = root.join(library.trim_start_matches('/'));
        std::fs::create_dir_all(to.parent().context("a library is in a folder")?)?;
        std::fs::copy(library, to).with_context(|| library.to_owned())?;
    }
    Ok(())
}

/// These programs, as an archive for `chroot`.
pub(crate) fn archive(dir: &Path, programs: &[&Path]) -> Result<PathBuf> {
    let (root, archive) = (dir.join("root"), dir.join("root.tar"));
    programs.iter().try_for_each(|program| carry(program, &root))?;
    printed(Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(&archive).arg("."))?;
    Ok(archive)
}
