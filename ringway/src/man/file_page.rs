//! ringway.toml(5), the configuration file: its words are those of the options.

use clap::{Arg, Args, Command};
use clap_mangen::roff::{Inline, Roff, bold, italic, roman};
use ringway_control::config::{DaemonArgs, DiskArgs, LimitArgs, NbdSecurity, XenArgs};

/// Words of the whole file that are options of a disk on the command line, or none.
const MORE: [(&str, &str, &str); 5] = [
    ("log-format", "FORMAT", "How log lines look: text or json."),
    ("log-level", "LEVEL", "What is logged: error, warn, info, debug or trace."),
    ("socket-mode", "MODE", "For all disks that do not say it: see there."),
    ("socket-group", "GROUP", "For all disks that do not say it: see there."),
    ("isolate", "true", "For all disks that do not say it: see there."),
];

/// What is told apart in a `[[xen.disk]]` table.
const TOLD_BY: &str = "Options for disks of some guests: those of [xen], and guest (a name), vdev (as in \
     the guest's configuration) and image, of which all that are there must fit. The first table that \
     fits a disk holds.";

const EXAMPLE: &str = "\
workers = 2
control = \"/run/ringway/vm1/control.sock\"
socket-group = \"kvm\"

[[disk]]
image = \"/srv/vm1.img\"
format = \"raw\"
socket = \"/run/ringway/vm1/disk.sock\"
queues = 4

[[disk]]
image = \"/dev/vg0/vm2\"
format = \"raw\"
socket = \"/run/ringway/vm1/data.sock\"
read-only = true";

/// The page.
pub(super) fn page() -> Vec<u8> {
    let mut roff = Roff::new();
    let source = concat!("ringway ", env!("CARGO_PKG_VERSION"));
    roff.control("TH", ["RINGWAY.TOML", "5", "", source, "Ringway"]);
    roff.control("SH", ["NAME"]);
    roff.text([roman("ringway.toml - disks that ringway serve offers to virtual machines")]);
    roff.control("SH", ["SYNOPSIS"]);
    roff.text([bold("ringway serve --config "), italic("FILE")]);
    roff.control("br", []);
    roff.text([
        roman("/etc/ringway/"),
        italic("NAME"),
        roman(".toml, of ringway@"),
        italic("NAME"),
        roman(".service"),
    ]);
    roff.control("SH", ["DESCRIPTION"]);
    roff.text([roman(
        "A file in TOML: words for the daemon, then a table [[disk]] for each disk, or [xen]. The words are \
         those of the options of ringway-serve(1), which win over the file. Relative paths begin at the \
         folder of the file. An unknown word is an error that names the line and lists the known ones.",
    )]);
    roff.control("SH", ["THE DAEMON"]);
    of::<DaemonArgs>(&mut roff, "");
    of::<NbdSecurity>(&mut roff, "");
    MORE.iter().for_each(|(word, value, help)| entry(&mut roff, word, value, help));
    roff.control("SH", ["[[disk]]"]);
    of::<DiskArgs>(&mut roff, "");
    entry(
        &mut roff,
        "limits",
        "{ WORD = N, … }",
        "What its guest may ask for: the words of LIMITS",
    );
    roff.control("SH", ["[[limit-group]]"]);
    roff.text([roman("Limits that the disks of a group share. They name it with limit-group.")]);
    entry(&mut roff, "name", "NAME", "What disks call it");
    entry(&mut roff, "limits", "{ WORD = N, … }", "Of all its disks together: the words of LIMITS");
    roff.control("SH", ["LIMITS"]);
    LimitArgs::augment_args(Command::new("limits"))
        .get_arguments()
        .for_each(|arg| argument(&mut roff, arg, ""));
    roff.control("SH", ["[xen]"]);
    roff.text([roman(
        "Disks that a Xen host's toolstack attaches. Also the words of [[disk]] but for image,",
    )]);
    roff.text([roman(
        "socket, socket-mode, socket-group, isolate, serial, queue-size and incoming.",
    )]);
    of::<XenArgs>(&mut roff, "xen-");
    roff.control("SH", ["[[xen.disk]]"]);
    roff.text([roman(TOLD_BY)]);
    roff.control("SH", ["EXAMPLES"]).control("nf", []);
    EXAMPLE.lines().for_each(|line| {
        roff.text([roman(line)]);
    });
    roff.control("fi", []);
    roff.control("SH", ["SEE ALSO"]);
    roff.text([bold("ringway-serve"), roman("(1), "), bold("ringway-control"), roman("(7)")]);
    roff.render().into_bytes()
}

/// The words of one kind of options, without `prefix`.
fn of<A: Args>(roff: &mut Roff, prefix: &str) {
    let command = A::augment_args(Command::new("ringway"));
    let limits = LimitArgs::augment_args(Command::new("limits"));
    let limits: Vec<_> = limits.get_arguments().map(Arg::get_id).collect();
    // Options stand beside each other, words of limits in a table of their own.
    let args = command.get_arguments().filter(|arg| !limits.contains(&arg.get_id()));
    args.for_each(|arg| argument(roff, arg, prefix));
}

fn argument(roff: &mut Roff, arg: &Arg, prefix: &str) {
    let word = arg.get_long().or(arg.is_positional().then_some("image"));
    let word = word.filter(|_| !arg.is_hide_set()).and_then(|word| word.strip_prefix(prefix));
    if let Some(word) = word {
        let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string);
        entry(roff, word, &value(arg), &help.unwrap_or_default());
    }
}

fn value(arg: &Arg) -> String {
    if !arg.get_action().takes_values() {
        return "true".into();
    }
    let names = arg.get_value_names().unwrap_or_default();
    names.first().map_or_else(|| "WORD".into(), ToString::to_string)
}

fn entry(roff: &mut Roff, word: &str, value: &str, help: &str) {
    let head: [Inline; 3] = [bold(word), roman(" = "), italic(value)];
    roff.control("TP", []).text(head).text([roman(help)]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every word that the reader of the file knows has its entry, and no other.
    #[test]
    fn the_page_has_the_words_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let known = |table: &str| {
            let file = folder.path().join("f.toml");
            std::fs::write(&file, format!("{table}\nno-such-word = 1\n")).unwrap();
            let error = ringway_control::config::read(&file).unwrap_err();
            let (_, list) = error.split_once("expected one of").unwrap();
            let words = list.split('`').skip(1).step_by(2).map(str::to_owned);
            words.collect::<Vec<_>>()
        };
        let page = String::from_utf8(page()).unwrap();
        let section = |from: &str, to: &str| {
            let (_, rest) = page.split_once(&format!(".SH {from}")).unwrap();
            rest.split_once(&format!(".SH {to}")).unwrap().0.to_owned()
        };
        for (table, from, to) in
            [("", "\"THE DAEMON\"", "[[disk]]"), ("[[disk]]", "[[disk]]", "[[limit-group]]")]
        {
            let section = section(from, to).replace("\\-", "-");
            let mut known = known(table);
            let tables: &[&str] =
                if table.is_empty() { &["disk", "xen", "limit-group"] } else { &[] };
            known.retain(|word| !tables.contains(&word.as_str()));
            for word in &known {
                assert!(
                    section.contains(&format!("\\fB{word}\\fR = ")),
                    "{table}: no {word}: {section}"
                );
            }
            assert_eq!(section.matches(".TP").count(), known.len(), "{table}: {known:?}");
        }
    }
}
