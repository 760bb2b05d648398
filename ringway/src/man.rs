//! `ringway completions` and `ringway man`: what shells and manuals want to know, from the very
//! definitions by which options are read.

mod file_page;
mod markdown;

use anyhow::Context;
use clap::{Args, Command, ValueHint};
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const SHELLS: &str = "\
Examples:
  ringway completions bash > ~/.local/share/bash-completion/completions/ringway
  ringway completions zsh > ~/.zfunc/_ringway
  ringway completions fish > ~/.config/fish/completions/ringway.fish

Exit status: 0 done, 1 failed, 2 wrong usage.";

const PAGES: &str = "\
Examples:
  ringway man /usr/local/share/man            write all pages, by their section
  ringway man . && man ./man1/ringway-copy.1  read one of them

Exit status: 0 done, 1 failed, 2 wrong usage.";

/// What bash gets besides: a command of `ctl` that takes a disk is offered those of the daemon that --control or
/// RINGWAY_CONTROL names.
const DISKS_IN_BASH: &str = r#"
_ringway_and_disks() {
    _ringway "$@"
    local at word in_ctl= takes_disk= control=$RINGWAY_CONTROL
    for ((at = 1; at < COMP_CWORD; at++)); do
        word=${COMP_WORDS[at]}
        case $word in
            --control) [[ ${COMP_WORDS[at + 1]} == = ]] && ((at++)); control=${COMP_WORDS[++at]} ;;
            ctl) in_ctl=1 ;;
            stats | remove | resize | limit | drain | retry | pause | resume | snapshot | flatten | commit)
                takes_disk=$in_ctl ;;
        esac
    done
    if [[ $takes_disk && $control && $2 != -* ]]; then
        COMPREPLY=($(compgen -W "$(ringway ctl --control "$control" list --json 2>/dev/null |
            sed -n 's/^ *"image": "\(.*\)",*$/\1/p')" -- "$2"))
    fi
}
complete -F _ringway_and_disks -o bashdefault -o default ringway
"#;

/// The same for zsh. Words that say where the daemon is may stand before those that `_arguments` is at.
const DISKS_IN_ZSH: &str = r#"
_ringway_disks() {
    local -a said=(${(Q)${(z)LBUFFER}}) disks
    local at control=$RINGWAY_CONTROL
    for ((at = 1; at <= $#said; at++)); do
        case $said[at] in
            --control) control=$said[$((at + 1))] ;;
            --control=*) control=${said[at]#*=} ;;
        esac
    done
    [[ -n $control ]] && disks=(${(f)"$(ringway ctl --control $control list --json 2>/dev/null |
        sed -n 's/^ *"image": "\(.*\)",*$/\1/p')"})
    compadd -a disks
}
"#;

/// The same for fish.
const DISKS_IN_FISH: &str = r#"
function __ringway_disks
    set -l control $RINGWAY_CONTROL
    set -l said (commandline -opc)
    for at in (seq (count $said))
        switch $said[$at]
            case --control
                set control $said[(math $at + 1)]
            case '--control=*'
                set control (string replace -- --control= '' $said[$at])
        end
    end
    test -n "$control"
    and ringway ctl --control $control list --json 2>/dev/null | string replace -rf '^ *"image": "(.*)",*$' '$1'
end
complete -c ringway -n "__fish_ringway_using_subcommand ctl; and __fish_seen_subcommand_from stats remove resize limit drain retry pause resume snapshot flatten commit" -f -a '(__ringway_disks)'
"#;

/// The script with `DISKS_IN_ZSH`: before the end, which runs it, and called where a disk is named.
fn with_disks_in_zsh(script: &str) -> String {
    let lines = script.lines().map(|line| match line.strip_suffix(":_default' \\") {
        Some(rest)
            if rest.trim_start_matches('\'').trim_start_matches(':').starts_with("disk -- ") =>
        {
            format!("{rest}:_ringway_disks' \\\n")
        }
        _ => format!("{line}\n"),
    });
    let script: String = lines.collect();
    let end = script.rfind("\nif [ \"$funcstack").unwrap_or(script.len());
    [&script[..end], DISKS_IN_ZSH, &script[end..]].concat()
}

/// The options of `ringway completions`.
#[derive(Debug, Args)]
#[command(after_help = SHELLS)]
pub(crate) struct CompletionsArgs {
    /// For which shell.
    #[arg(value_enum, value_name = "SHELL")]
    shell: Shell,
}

/// The options of `ringway man`.
#[derive(Debug, Args)]
#[command(after_help = PAGES)]
pub(crate) struct ManArgs {
    /// The folder in which man1, man5 and man7 get the pages; all are made if they are not there.
    #[arg(value_name = "DIR", value_hint = ValueHint::DirPath)]
    folder: PathBuf,
}

/// Carries out `ringway completions`, of the program `command`.
///
/// # Errors
/// Standard output that cannot be written: half a script is worse than none.
pub(crate) fn completions(
    args: &CompletionsArgs,
    command: &mut Command,
) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, command, "ringway", &mut script);
    let script = String::from_utf8(script)?;
    ringway_terminal::output::print(&match args.shell {
        Shell::Bash => script + DISKS_IN_BASH,
        Shell::Zsh => with_disks_in_zsh(&script),
        Shell::Fish => script + DISKS_IN_FISH,
        _ => script,
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Carries out `ringway man`, of the program `command`.
///
/// # Errors
/// What the host says.
pub(crate) fn pages(args: &ManArgs, mut command: Command) -> anyhow::Result<ExitCode> {
    let folder = &args.folder;
    let section = |number: u8| {
        let section = folder.join(format!("man{number}"));
        let made = std::fs::create_dir_all(&section);
        made.with_context(|| format!("cannot make {}", section.display())).map(|()| section)
    };
    command.build();
    write_page(&section(1)?, &command, "ringway")?;
    write(&section(5)?.join("ringway.toml.5"), file_page::page())?;
    let about = "the requests and answers of a running daemon's socket";
    let text = include_str!("../control.md");
    write(
        &section(7)?.join("ringway-control.7"),
        markdown::page("ringway-control", "7", about, text),
    )?;
    Ok(ExitCode::SUCCESS)
}

fn write(path: &Path, text: Vec<u8>) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Writes the page of a command, and those of its subcommands.
fn write_page(folder: &Path, command: &Command, name: &str) -> anyhow::Result<()> {
    write(&folder.join(format!("{name}.1")), page(command, name)?)?;
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
        write_page(folder, sub, &format!("{name}-{}", sub.get_name()))?;
    }
    Ok(())
}

/// One page, its sections in the order of man-pages(7).
fn page(command: &Command, name: &str) -> anyhow::Result<Vec<u8>> {
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let Sections { notes, exit, examples } = Sections::of(&help);
    // A page lives as long as the program.
    let title: &'static str = Box::leak(name.to_owned().into_boxed_str());
    let man = Man::new(command.clone().name(title).display_name(title))
        .title(name.to_uppercase())
        .section("1")
        .source(concat!("ringway ", env!("CARGO_PKG_VERSION")))
        .manual("Ringway");
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    let subs: Vec<_> = command.get_subcommands().filter(|sub| sub.get_name() != "help").collect();
    if !subs.is_empty() {
        let mut roff = Roff::new();
        roff.control("SH", ["COMMANDS"]);
        for sub in &subs {
            let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
            roff.control("TP", []);
            roff.text([bold(format!("{name}-{}(1)", sub.get_name()))]).text([roman(about)]);
        }
        text.extend(roff.render().into_bytes());
    }
    for (heading, lines) in [("NOTES", notes), ("EXIT STATUS", exit), ("EXAMPLES", examples)] {
        if lines.is_empty() {
            continue;
        }
        let mut roff = Roff::new();
        roff.control("SH", [heading]).control("nf", []);
        lines.iter().for_each(|line| {
            roff.text([roman(line.as_str())]);
        });
        roff.control("fi", []);
        text.extend(roff.render().into_bytes());
    }
    let mut also = Roff::new();
    also.control("SH", ["SEE ALSO"]);
    let parent = name.rsplit_once('-').map_or("qemu-storage-daemon", |(parent, _)| parent);
    let mut pages = vec![bold(parent), roman("(1)")];
    if matches!(name, "ringway" | "ringway-serve" | "ringway-ctl") {
        pages.extend([roman(", "), bold("ringway.toml"), roman("(5), ")]);
        pages.extend([bold("ringway-control"), roman("(7)")]);
    }
    also.text(pages);
    text.extend(also.render().into_bytes());
    Ok(text)
}

/// The text behind a command's options, by what it is about.
#[derive(Debug, Default, PartialEq, Eq)]
struct Sections {
    notes: Vec<String>,
    exit: Vec<String>,
    examples: Vec<String>,
}

impl Sections {
    /// Paragraphs that begin with "Examples:", a line that begins with "Exit status:" and those
    /// after it, and the rest.
    fn of(help: &str) -> Self {
        let mut found = Self::default();
        for paragraph in help.split("\n\n") {
            let mut lines = paragraph.lines().peekable();
            let examples = lines.next_if(|line| *line == "Examples:").is_some();
            let mut place = if examples { &mut found.examples } else { &mut found.notes };
            if !place.is_empty() && lines.peek().is_some_and(|l| !l.starts_with("Exit status:")) {
                place.push(String::new());
            }
            for line in lines {
                let line = match line.strip_prefix("Exit status:") {
                    Some(rest) => {
                        place = &mut found.exit;
                        rest.trim_start()
                    }
                    None => line,
                };
                place.push(line.to_owned());
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory;

    #[test]
    fn text_behind_the_options_is_sorted() {
        let help = "Examples:\n  a\n\nA note.\n\nMore.\nExit status: 0 done,\n1 failed.";
        let lines = |lines: &[&str]| lines.iter().map(ToString::to_string).collect();
        assert_eq!(
            Sections::of(help),
            Sections {
                notes: lines(&["A note.", "", "More."]),
                exit: lines(&["0 done,", "1 failed."]),
                examples: lines(&["  a"]),
            }
        );
    }

    /// Every command: examples and exit statuses, and nothing wider than a terminal.
    #[test]
    fn every_command_has_examples_and_tells_its_exit_status() {
        let mut cli = Cli::command();
        cli.build();
        let mut commands = vec![&cli];
        while let Some(command) = commands.pop() {
            commands.extend(command.get_subcommands().filter(|sub| sub.get_name() != "help"));
            let name = command.get_name();
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let nested = command.has_subcommands() && name != "ringway";
            let sections = Sections::of(&help);
            assert!(nested || !sections.examples.is_empty(), "{name}: no examples");
            assert!(nested || !sections.exit.is_empty(), "{name}: no exit status");
            for line in help.lines() {
                assert!(line.chars().count() <= 80, "{name}: too wide: {line}");
            }
        }
    }
}
