//! Rules about crates: arrows, dependencies, licences, manifests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::policy::{self, Allowed};
use super::{Finding, Source, licence, line_of};
use crate::{process, repo};

const LIMIT: Duration = Duration::from_mins(5);

/// Checks every crate of the workspace and every package that it resolves to.
///
/// # Errors
///
/// If `cargo metadata` fails or says what we can't read.
pub(super) fn check(sources: &[Source]) -> Result<Vec<Finding>> {
    let metadata = metadata()?;
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata lists packages")?;
    let members = metadata["workspace_members"]
        .as_array()
        .context("cargo metadata has members")?;
    let mut findings = Vec::new();
    for package in packages {
        if !members.contains(&package["id"]) {
            findings.extend(licence_of(package)?);
            continue;
        }
        let name = text(package, "name")?;
        let manifest = manifest_of(package)?;
        match policy::CRATES.iter().find(|allowed| allowed.name == name) {
            Some(allowed) => findings.extend(dependencies(package, allowed, &manifest, sources)?),
            None => findings.push(Finding::new(
                &manifest,
                1,
                format!("{name} is not a known crate"),
            )),
        }
        findings.extend(manifest_rules(&manifest, sources));
    }
    Ok(findings)
}

fn metadata() -> Result<Value> {
    let mut cargo = Command::new("cargo");
    cargo.current_dir(repo::root()).args([
        "metadata",
        "--quiet",
        "--format-version",
        "1",
        "--locked",
        "--all-features",
    ]);
    let json = process::output(&mut cargo, LIMIT)?;
    serde_json::from_str(&json).context("reading the output of cargo metadata")
}

fn text<'a>(value: &'a Value, key: &str) -> Result<&'a str> {
    value[key]
        .as_str()
        .with_context(|| format!("cargo metadata has a {key}"))
}

fn manifest_of(package: &Value) -> Result<PathBuf> {
    let path = Path::new(text(package, "manifest_path")?);
    let relative = path
        .strip_prefix(repo::root())
        .context("a member lies in the repository")?;
    Ok(relative.to_path_buf())
}

fn licence_of(package: &Value) -> Result<Option<Finding>> {
    let name = text(package, "name")?;
    let expression = package["license"].as_str().unwrap_or("");
    let what = match licence::is_allowed(expression, policy::LICENCES) {
        Some(true) => return Ok(None),
        Some(false) => format!("{name} has the licence {expression}, which is not allowed"),
        None => format!("{name} has no readable licence: '{expression}'"),
    };
    Ok(Some(Finding::new("Cargo.lock", 1, what)))
}

fn dependencies(
    package: &Value,
    allowed: &Allowed,
    manifest: &Path,
    sources: &[Source],
) -> Result<Vec<Finding>> {
    let manifest_text = source_text(manifest, sources);
    let list = package["dependencies"]
        .as_array()
        .context("a package lists dependencies")?;
    let mut findings = Vec::new();
    for dependency in list {
        let name = text(dependency, "name")?;
        let for_itself = dependency["kind"].is_null();
        let known = if policy::CRATES.iter().any(|member| member.name == name) {
            // An arrow is an arrow, also when only a test follows it. A crate's tests may name the
            // crate itself, to switch a feature on.
            allowed.workspace.contains(&name)
                || (!for_itself && (allowed.workspace_dev.contains(&name) || allowed.name == name))
        } else {
            allowed.external.contains(&name)
                || (!for_itself && allowed.external_dev.contains(&name))
        };
        if !known {
            let line = line_of(manifest_text, |line| line.starts_with(name));
            let purpose = if for_itself {
                ""
            } else {
                " for tests or builds"
            };
            let what = format!("{} may not depend on {name}{purpose}", allowed.name);
            findings.push(Finding::new(manifest, line, what));
        }
    }
    Ok(findings)
}

fn manifest_rules(manifest: &Path, sources: &[Source]) -> Vec<Finding> {
    let text = source_text(manifest, sources);
    let squeezed: String = text.split_whitespace().collect();
    let rules = [
        (
            "[lints]workspace=true",
            "the lints of the workspace are not switched on",
        ),
        (
            "publish.workspace=true",
            "`publish.workspace = true` is missing",
        ),
        (
            "license.workspace=true",
            "`license.workspace = true` is missing",
        ),
        (
            "rust-version.workspace=true",
            "`rust-version.workspace = true` is missing",
        ),
    ];
    rules
        .iter()
        .filter(|(needed, _)| !squeezed.contains(needed))
        .map(|(_, what)| Finding::new(manifest, 1, *what))
        .collect()
}

fn source_text<'a>(path: &Path, sources: &'a [Source]) -> &'a str {
    sources
        .iter()
        .find(|source| source.path == path)
        .map_or("", |source| &source.text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn package(dependencies: &Value) -> Value {
        json!({ "name": "kv-core", "dependencies": dependencies })
    }

    fn findings(dependencies: &Value) -> Vec<String> {
        let allowed = Allowed {
            name: "kv-scheduler",
            workspace: &["kv-core"],
            workspace_dev: &["kv-model"],
            external: &["thiserror"],
            external_dev: &["proptest"],
        };
        let package = package(dependencies);
        dependencies_found(&package, &allowed)
    }

    fn dependencies_found(package: &Value, allowed: &Allowed) -> Vec<String> {
        let manifest = Path::new("kv-scheduler/Cargo.toml");
        let found = dependencies(package, allowed, manifest, &[]).unwrap();
        found.into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn an_arrow_up_is_found_also_in_tests() {
        let list = json!([
            { "name": "kv-core", "kind": null },
            { "name": "kv-server", "kind": null },
            { "name": "kv-model", "kind": "dev" },
            { "name": "kv-model", "kind": null },
            { "name": "kv-telemetry", "kind": "dev" },
        ]);
        let expected = [
            "kv-scheduler may not depend on kv-server",
            "kv-scheduler may not depend on kv-model",
            "kv-scheduler may not depend on kv-telemetry for tests or builds",
        ];
        assert_eq!(findings(&list), expected);
    }

    #[test]
    fn a_test_helper_stays_in_tests() {
        let list = json!([
            { "name": "thiserror", "kind": null },
            { "name": "proptest", "kind": "dev" },
            { "name": "proptest", "kind": null },
        ]);
        assert_eq!(findings(&list), ["kv-scheduler may not depend on proptest"]);
    }

    #[test]
    fn a_foreign_licence_is_found() {
        let package = |licence: Value| json!({ "name": "x", "license": licence });
        assert_eq!(licence_of(&package(json!("MIT OR GPL-3.0"))).unwrap(), None);
        assert!(licence_of(&package(json!("GPL-3.0"))).unwrap().is_some());
        assert!(licence_of(&package(Value::Null)).unwrap().is_some());
    }
}
