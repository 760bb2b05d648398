//! The prompt: a line editor with history and completion of commands.

use super::command::{Command, Next, Session};
use super::target::Target;
use clap::CommandFactory;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::MemHistory;
use rustyline::validate::Validator;
use rustyline::{Config, Context, Editor, Helper};

/// Knows the commands.
struct Words(Vec<String>);

impl Completer for Words {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        at: usize,
        _: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let typed = &line[..at];
        // Only the first word is one of a list; after `help` the second.
        let start =
            if let Some(rest) = typed.strip_prefix("help ") { typed.len() - rest.len() } else { 0 };
        let found = |word: &&String| word.starts_with(&typed[start..]);
        Ok((start, self.0.iter().filter(found).map(|word| format!("{word} ")).collect()))
    }
}

impl Hinter for Words {
    type Hint = String;
}
impl Highlighter for Words {}
impl Validator for Words {}
impl Helper for Words {}

/// Asks for lines until there are no more.
///
/// # Errors
/// A terminal that cannot be used.
pub(crate) fn run(session: &mut Session, target: &Target) -> anyhow::Result<()> {
    let names = Command::command();
    let mut words: Vec<_> = names.get_subcommands().map(|c| c.get_name().to_owned()).collect();
    words.push("help".into());
    let config = Config::builder().auto_add_history(true).build();
    let mut editor = Editor::<Words, MemHistory>::with_history(config, MemHistory::new())?;
    editor.set_helper(Some(Words(words)));
    super::command::say(&format!("{target}  {}  (help, quit)", session.medium().facts()))?;
    loop {
        match editor.readline("ringway> ") {
            Ok(line) => match session.line(&line) {
                Ok(Next::GoOn) => {}
                Ok(Next::Quit) => return Ok(()),
                Err(failure) => ringway_terminal::logging::complain(&failure.error()),
            },
            // The line is given up, as in a shell.
            Err(ReadlineError::Interrupted) => {}
            Err(ReadlineError::Eof) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
