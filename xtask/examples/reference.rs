//! Prints the reference pages generated from the tables of engram-api; `cargo xtask generate` commits the output.
//!
//! This is an example and not a part of xtask, because only this needs the library and every `cargo xtask` waits for xtask to build.
//!
//! `reference schema` prints the JSON Schema of manifests, for editors; `reference operator-schema` that of the operator's file;
//! `reference errors` the page of error and exit codes; the plural of a kind prints its CustomResourceDefinition.

use engram_api::{Code, ExitCode};

fn main() -> std::process::ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("schema") => {
            let schema = engram_api::schema(None).expect("the schema of all kinds exists");
            println!("{schema:#}");
        }
        Some("operator-schema") => println!("{:#}", engram_api::operator_schema()),
        Some("errors") => print!("{}", errors()),
        Some(plural) if engram_api::crd::PLURALS.contains(&plural) => {
            print!("{}", engram_api::crd::to_yaml(plural).expect("every kind has a definition"));
        }
        _ => {
            eprintln!("usage: reference schema|operator-schema|errors|{}", engram_api::crd::PLURALS.join("|"));
            return ExitCode::Usage.into();
        }
    }
    ExitCode::Ok.into()
}

fn errors() -> String {
    let mut page = "# Errors and exit codes\n\n\
        Written by `cargo xtask generate`. A code is never reused and never changes its meaning; `engram explain CODE` prints\n\
        the same text.\n\n\
        ## Exit codes\n\n| exit code | meaning |\n| --- | --- |\n"
        .to_owned();
    for code in ExitCode::ALL {
        page.push_str(&format!("| {} | {} |\n", code.number(), code.meaning()));
    }
    page.push_str("\n## Error codes\n");
    for code in Code::ALL {
        let (id, title, exit) = (code.id(), code.title(), code.exit_code().number());
        page.push_str(&format!("\n### {id}: {title}\n\n{}\n\nExit code {exit}.\n", code.explanation().trim_end()));
    }
    page
}
