//! Writes `docs/control.schema.json`.

use anyhow::Context;
use ringway_control::schema::schema;
use std::path::Path;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/control.schema.json");

/// Writes the file.
///
/// # Errors
/// What the host says.
pub(crate) fn run() -> anyhow::Result<()> {
    std::fs::write(Path::new(FILE), text()?).context(FILE)
}

fn text() -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(&schema())? + "\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_of_the_control_socket_is_up_to_date() {
        let there = std::fs::read_to_string(FILE).unwrap();
        assert!(there == text().unwrap(), "{FILE}: run cargo xtask schema");
    }
}
