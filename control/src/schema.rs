//! The JSON schema of the control socket's lines, made from the types that read and write them:
//! `docs/control.schema.json`.

use crate::protocol::{
    DiskFacts, Done, Event, JobOf, Limited, List, Reloaded, Removed, Reply, ResizedTo, Retried,
    Snapshotted, Stats, VERSION,
};
use crate::request::{
    Add, Commit, Flatten, Limit, Nothing, One, Reload, Resize, Retry, Snapshot, StatsRequest,
};
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

/// The whole of it. A line is one of the definitions `Request`, `Reply` and `Event`; the `answer` of a
/// reply that is `ok` is `answer.COMMAND`.
pub fn schema() -> Value {
    let mut generator = SchemaSettings::draft2020_12().into_generator();
    let requests = [
        request::<Nothing>("list"),
        request::<StatsRequest>("stats"),
        request::<Nothing>("events"),
        request::<Reload>("reload"),
        request::<Add>("add"),
        request::<One>("remove"),
        request::<Resize>("resize"),
        request::<Limit>("limit"),
        request::<One>("drain"),
        request::<One>("pause"),
        request::<One>("resume"),
        request::<Retry>("retry"),
        request::<Snapshot>("snapshot"),
        request::<Flatten>("flatten"),
        request::<Commit>("commit"),
    ];
    let requests: Vec<_> = requests.iter().map(|make| make(&mut generator)).collect();
    let answers = [
        answer::<List>("list"),
        answer::<Stats>("stats"),
        answer::<Nothing>("events"),
        answer::<Reloaded>("reload"),
        answer::<DiskFacts>("add"),
        answer::<Removed>("remove"),
        answer::<ResizedTo>("resize"),
        answer::<Limited>("limit"),
        answer::<Done>("drain"),
        answer::<Done>("pause"),
        answer::<Done>("resume"),
        answer::<Retried>("retry"),
        answer::<Snapshotted>("snapshot"),
        answer::<JobOf>("flatten"),
        answer::<JobOf>("commit"),
    ];
    let answers: Map<String, Value> =
        answers.iter().map(|(name, make)| (name.clone(), make(&mut generator))).collect();
    generator.subschema_for::<Reply>();
    generator.subschema_for::<Event>();
    let mut definitions = generator.take_definitions(true);
    definitions.extend(answers);
    definitions.insert("Request".into(), json!({ "oneOf": requests }));
    let refer = |name: &str| json!({ "$ref": format!("#/$defs/{name}") });
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The control socket of ringway serve",
        "description": format!(
            "Version {VERSION}. One line is one object; docs/control.md says what they mean."
        ),
        "anyOf": [refer("Request"), refer("Reply"), refer("Event")],
        "$defs": definitions,
    })
}

type Make = Box<dyn Fn(&mut SchemaGenerator) -> Value>;

/// The fields of a command, and those that every request has.
fn request<T: JsonSchema>(command: &'static str) -> Make {
    Box::new(move |generator| {
        let mut schema = T::json_schema(generator).to_value();
        let common = json!({
            "command": { "const": command },
            "version": { "const": VERSION },
            "id": true,
        });
        if let (Value::Object(common), Some(schema)) = (common, schema.as_object_mut()) {
            schema.insert("title".into(), command.into());
            for (field, empty) in [("properties", json!({})), ("required", json!([]))] {
                schema.entry(field).or_insert(empty);
            }
            schema["properties"].as_object_mut().into_iter().for_each(|all| {
                all.extend(common.clone());
            });
            schema["required"].as_array_mut().into_iter().for_each(|all| {
                all.insert(0, "command".into());
            });
        }
        schema
    })
}

fn answer<T: JsonSchema>(command: &str) -> (String, Make) {
    let make = |generator: &mut SchemaGenerator| generator.subschema_for::<T>().to_value();
    (format!("answer.{command}"), Box::new(make))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::COMMANDS;

    #[test]
    fn every_command_has_a_request_and_an_answer() {
        let schema = schema();
        let requests = schema["$defs"]["Request"]["oneOf"].as_array().unwrap();
        let commands = requests.iter().map(|one| one["properties"]["command"]["const"].as_str());
        assert_eq!(commands.flatten().collect::<Vec<_>>(), COMMANDS);
        for command in COMMANDS {
            assert!(schema["$defs"][format!("answer.{command}")].is_object(), "{command}");
        }
    }
}
