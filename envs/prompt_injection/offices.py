"""Defines the tools of the nine simulated offices, with NeMo-Gym's names and parameters.

Each office has its kinds of records, and a table of its tools, made from the shapes in
envs/prompt_injection/worlds.py. If no shape fits, a function is defined above the table. The data
rows describe the tools to the policy.
"""

from dataclasses import replace

from envs.prompt_injection import worlds
from envs.prompt_injection.worlds import (
    Args,
    Kind,
    Output,
    Record,
    World,
    alike,
    append,
    equal,
    filled,
    given,
    holds,
    matches,
    messages,
    must,
    text,
    tool,
    where,
    write,
)

LONGEST = 1000  # limit for hours times a rate, in characters or items

# --- messages in several offices ------------------------------------------------------------------


def user(world: World) -> Record:
    """Returns the record of the person who works in the office."""
    return world.tables.get("current_user", {})


def send_message(world: World, args: Args) -> str:
    """Adds a message; the office's parameter for the recipient may have any of three names."""
    me = user(world)
    author = args["from_"] or me.get("email") or me.get("name", "system@example.com")
    to = args["recipient"] or args["to"] or args["recipients"]
    if isinstance(to, list):
        named = ", ".join(str(each) for each in to)
    elif to:
        named = str(to)
    else:
        named = "unknown"
    words = "from to subject body timestamp=sent case_id? related_claim_id?"
    message = filled(words, args | {"from": author, "to": named})
    inbox = world.tables.get("messages")
    if isinstance(inbox, dict):
        message["message_id"] = world.new_id("MSG-")
        inbox[message["message_id"]] = message
    else:
        world.tables.setdefault("messages", []).append(message)
    return f"Message sent to {named}."


SEND_MESSAGE = tool(
    "recipient? to? recipients? from_? subject: body: case_id? related_claim_id?", send_message
)
MESSAGES = {
    "send_message": SEND_MESSAGE,
    "get_messages": messages(
        "messages",
        where("case_id", equal),
        where("from_", alike, "from"),
        where("to", alike),
        given("is_read", equal),
    ),
}

# --- healthcare -----------------------------------------------------------------------------------

PATIENT = Kind("patients", "patient_id", "Patient", needed=True)
APPOINTMENT = Kind("appointments", "appointment_id", "Appointment", "A", needed=True)


def is_patient(record: Record, name: str, value: str) -> bool:
    """Returns whether the name or one of the conditions contains the value."""
    is_named = holds(record, name, value)
    wanted = value.lower()
    return any(wanted in each.lower() for each in record.get("conditions", [])) or is_named


def prescribe(world: World, args: Args) -> str:
    """Adds a prescription for a patient, who may be unknown."""
    patient = args["patient_id"]
    if patient not in world.tables.get("prescriptions", {}):
        world.tables.setdefault("prescriptions", {})[patient] = []
    made = filled("medication dosage instructions", args)
    world.tables["prescriptions"][patient].append(made)
    return f"Prescribed {args['medication']} {args['dosage']} for patient {patient}."


def get_prescriptions(world: World, args: Args) -> Output:
    """Returns a patient's prescriptions."""
    return world.tables.get("prescriptions", {}).get(args["patient_id"], [])


def get_lab_results(world: World, args: Args) -> Output:
    """Returns a patient's laboratory results."""
    return world.tables.get("lab_results", {}).get(args["patient_id"], [])


HEALTHCARE = {
    "search_patients": PATIENT.find(text("query", is_patient, "name"), columns="patient_id name"),
    "get_patient_record": PATIENT.read(),
    "update_patient_chart": PATIENT.note(
        "notes", "chart_notes", "Chart updated for patient {patient_id}."
    ),
    "get_schedule": APPOINTMENT.find(must("date", equal)),
    "schedule_appointment": APPOINTMENT.add(
        "patient_id date time reason status=scheduled",
        "Appointment {appointment_id} scheduled for patient {patient_id} on {date} at {time}.",
    ),
    "cancel_appointment": APPOINTMENT.change(
        "status=cancelled", "Appointment {appointment_id} has been cancelled."
    ),
    "send_referral": append(
        "sent_actions",
        "type=referral patient_id specialist_email reason",
        "Referral sent for patient {patient_id} to {specialist_email}.",
    ),
    "prescribe_medication": tool("patient_id medication dosage instructions", prescribe),
    "get_prescriptions": tool("patient_id", get_prescriptions),
    "get_lab_results": tool("patient_id", get_lab_results),
}

# --- human resources ------------------------------------------------------------------------------

CANDIDATE = Kind("candidates", "candidate_id", "Candidate")
INTERVIEW = Kind("interviews", "interview_id", prefix="I-")
POSITION = Kind("open_positions", "position_id", prefix="POS-")
FEEDBACK = INTERVIEW.add(
    "candidate_id feedback rating", "Feedback submitted for candidate {candidate_id}."
)


def submit_feedback(world: World, args: Args) -> Output:
    """Writes feedback into a candidate's first interview, or into a new one."""
    for interview in INTERVIEW.records(world).values():
        if equal(interview, "candidate_id", args["candidate_id"]):
            write(interview, "feedback rating", args)
            return f"Feedback submitted for candidate {args['candidate_id']}."
    return FEEDBACK.action(world, args)


def send_email(world: World, args: Args) -> str:
    """Adds an email to the inbox, or to the messages if there is no inbox."""
    author = user(world).get("email", "system@company.example")
    known = args | {"from": author, "to": args["recipient"]}
    mail = filled("from to subject body timestamp=sent", known)
    if "inbox" in world.tables:
        world.tables["inbox"].append(mail)
    else:
        world.tables.setdefault("messages", []).append(mail)
    return f"Email sent to {args['recipient']}."


def get_inbox(world: World, args: Args) -> Output:
    """Returns all emails."""
    return world.tables.get("inbox", world.tables.get("messages", []))


HR = {
    "search_candidates": CANDIDATE.find(
        text("query", holds, "name resume application_notes position_applied"),
        given("status", alike),
        columns="candidate_id name",
    ),
    "get_candidate_profile": CANDIDATE.read(),
    "update_candidate_status": CANDIDATE.change(
        "status", "Status updated for candidate {candidate_id} to '{status}'."
    ),
    "schedule_interview": INTERVIEW.add(
        "candidate_id interviewer_email date time status=scheduled",
        "Interview {interview_id} scheduled for candidate {candidate_id} on {date} at {time}.",
    ),
    "get_interview_schedule": INTERVIEW.find(given("date", equal)),
    "submit_interview_feedback": replace(FEEDBACK, action=submit_feedback),
    "send_offer": append(
        "sent_actions",
        "type=offer candidate_id position salary start_date",
        "Offer sent to candidate {candidate_id} for position '{position}'.",
    ),
    "send_email": tool("recipient subject body", send_email),
    "get_inbox": tool("", get_inbox),
    "get_open_positions": POSITION.find(),
    "create_job_posting": POSITION.add(
        "title description requirements status=open",
        "Job posting '{title}' created with ID {position_id}.",
    ),
}

# --- ecommerce ------------------------------------------------------------------------------------

ORDER = Kind("orders", "order_id", "Order")
PRODUCT = Kind("products", "product_id", "Product")
REFUND = Kind("refunds", "refund_id")
TICKET = Kind("support_tickets", "ticket_id", "Ticket", "T-")


def process_refund(world: World, args: Args) -> str:
    """Marks a refund as processed, or adds a processed one."""
    key = args["refund_id"]
    if key in REFUND.records(world):
        words = "status=processed amount reason?? admin_notes??"
        write(REFUND.records(world)[key], words, args)
    else:
        words = "refund_id amount status=processed reason?? admin_notes??"
        REFUND.made(world)[key] = filled(words, args)
    return f"Refund {key} processed for ${args['amount']}."


ECOMMERCE = {
    "search_orders": ORDER.find(where("customer_id", equal), where("status", alike)),
    "get_order_details": ORDER.read(),
    "update_order_status": ORDER.change("status", "Order {order_id} status updated to '{status}'."),
    "add_order_note": ORDER.note("note", "notes", "Note added to order {order_id}."),
    "search_products": PRODUCT.find(
        where("category", alike), where("query", holds, "name description")
    ),
    "get_product_details": PRODUCT.read(),
    "update_product_stock": PRODUCT.change(
        "stock_quantity", "Stock updated for product {product_id} to {stock_quantity}."
    ),
    "process_refund": tool("refund_id amount reason? admin_notes?", process_refund),
    "create_support_ticket": TICKET.add(
        "customer_id subject description status=open priority:medium order_id??",
        "Support ticket {ticket_id} created.",
    ),
    "get_ticket_details": TICKET.read(),
    "update_ticket_status": TICKET.change(
        "status priority??", "Ticket {ticket_id} updated to status '{status}'."
    ),
}

# --- education ------------------------------------------------------------------------------------

COURSE = Kind("courses", "course_id", "Course", "C-")
AID = Kind("financial_aid", "aid_id", "Financial aid record")
GRADE = Kind("grades", "grade_id", prefix="G-")
STUDENT = Kind("students", "student_id", "Student")


def is_student(record: Record, name: str, value: str) -> bool:
    """Returns whether the full name contains the value."""
    whole = f"{record.get('first_name', '')} {record.get('last_name', '')}"
    return value.lower() in whole.lower()


EDUCATION = {
    "list_courses": COURSE.find(where("department", alike)),
    "get_course_detail": COURSE.read(),
    "create_course": COURSE.add(
        "course_code title description credits department instructor_id schedule",
        "Course '{title}' ({course_code}) created with ID {course_id}.",
    ),
    "get_financial_aid": AID.find(must("student_id", equal)),
    "adjust_financial_aid": AID.read("amount? status? reviewer_notes?"),
    "get_grades_for_student": GRADE.find(must("student_id", equal)),
    "submit_grade": GRADE.add(
        "student_id course_id assignment_name score max_score grader_comments:",
        "Grade submitted for student {student_id} in course {course_id}.",
    ),
    "search_students": STUDENT.find(
        where("name", is_student), where("major", holds), where("email", matches)
    ),
    "get_student_record": STUDENT.read(),
    "update_student_advisor_notes": STUDENT.note(
        "notes", "advisor_notes", "Advisor notes updated for student {student_id}."
    ),
}

# --- insurance ------------------------------------------------------------------------------------

ADJUSTER_NOTE = Kind("adjuster_notes", "note_id", prefix="AN-")
CLAIM = Kind("claims", "claim_id", "Claim", "CL-")
FLAG = Kind("fraud_investigation_flags", "flag_id", prefix="FF-")
PAYOUT = Kind("payouts", "payout_id", prefix="PO-")
POLICY = Kind("policies", "policy_id", "Policy")


def is_of_claim(record: Record, name: str, value: str) -> bool:
    """Returns whether a message belongs to a claim, according to either of two fields."""
    return equal(record, "related_claim_id", value) or equal(record, name, value)


INSURANCE = {
    "add_adjuster_note": ADJUSTER_NOTE.add("claim_id adjuster_id note_text timestamp=created"),
    "get_adjuster_notes_for_claim": ADJUSTER_NOTE.find(must("claim_id", equal)),
    "create_claim": CLAIM.add(
        "policy_id claim_number date_of_loss description claim_type amount_requested status=open "
        "adjuster_id"
    ),
    "get_claim_by_id": CLAIM.read(),
    "update_claim_description": CLAIM.change(
        "description", "Claim {claim_id} description updated."
    ),
    "send_message": SEND_MESSAGE,
    "get_messages_for_claim": messages("messages", must("claim_id", is_of_claim)),
    "flag_fraud_investigation": FLAG.add(
        "claim_id investigator_id flag_reason severity status=open"
    ),
    "process_payout": PAYOUT.add("claim_id amount date method status=processed notes"),
    "get_policy_by_id": POLICY.read(),
    "search_policies_by_holder": POLICY.find(text("policyholder_name", holds)),
    "update_policy_notes": POLICY.change("notes", "Policy {policy_id} notes updated."),
}

# --- help desk ------------------------------------------------------------------------------------

ASSET = Kind("assets", "asset_id", "Asset")
ARTICLE = Kind("knowledge_base_articles", "article_id", "Article")
INCIDENT = Kind("incidents", "ticket_id", "Incident", "INC-")

HELPDESK = {
    "search_assets": ASSET.find(
        where("tag", holds),
        where("type", alike),
        where("status", alike),
        where("location", holds),
    ),
    "get_asset": ASSET.read(),
    "update_asset_notes": ASSET.change("notes", "Asset {asset_id} notes updated."),
    "search_kb_articles": ARTICLE.find(
        where("category", alike), where("keyword", holds, "title content")
    ),
    "get_kb_article": ARTICLE.read(),
    "update_kb_article_content": ARTICLE.change("content", "Article {article_id} content updated."),
    "search_incidents": INCIDENT.find(
        where("status", alike),
        where("priority", alike),
        where("keyword", holds, "title description"),
    ),
    "get_incident": INCIDENT.read(),
    "update_incident_description": INCIDENT.change(
        "description", "Incident {ticket_id} description updated."
    ),
    "create_incident": INCIDENT.add(
        "title description status=Open priority assigned_to", "Incident {ticket_id} created."
    ),
}

# --- legal ----------------------------------------------------------------------------------------

BILLING = Kind("billing_records", "billing_id", prefix="BL-")
CASE = Kind("case_files", "case_id", "Case")
HEARING = Kind("court_schedules", "schedule_id", "Schedule")
FILING = Kind("document_filings", "filing_id", "Filing", "DF-")
ENTRY = BILLING.add(
    "case_id date description hours rate amount billable attorney??",
    "Billing entry {billing_id} added for case {case_id}.",
)
FILE = FILING.add(
    "case_id document_type title filing_date court_name file_path served_parties notes??",
    "Document filing {filing_id} created for case {case_id}.",
)


def add_billing_entry(world: World, args: Args) -> Output:
    """Adds an entry with its amount. Raises MemoryError if a text or list would get too long."""
    hours = args["hours"]
    rate = args["rate"]
    for repeated, times in ((hours, rate), (rate, hours)):
        is_repeated = isinstance(repeated, str | list) and isinstance(times, int)
        if is_repeated and len(repeated) * times > LONGEST:
            raise MemoryError
    billable = True if args["billable"] is None else args["billable"]
    return ENTRY.action(world, args | {"amount": hours * rate, "billable": billable})


def create_filing(world: World, args: Args) -> Output:
    """Adds a filing, with an empty list of served parties if none are named."""
    return FILE.action(world, args | {"served_parties": args["served_parties"] or []})


LEGAL = {
    "add_billing_entry": tool(
        "case_id date description hours rate billable? attorney?", add_billing_entry
    ),
    "get_billing_report": BILLING.find(
        where("case_id", equal),
        where("start_date", worlds.since, "date"),
        where("end_date", worlds.until, "date"),
        given("billable", equal),
    ),
    "search_cases": CASE.find(
        where("client_name", holds), where("case_type", matches), where("status", matches)
    ),
    "get_case_file": CASE.read(),
    "update_case_notes": CASE.change("notes", "Case {case_id} notes updated."),
    "get_court_schedule": HEARING.read(),
    "search_schedules": HEARING.find(
        where("case_id", equal),
        where("start_date", worlds.since, "scheduled_date"),
        where("end_date", worlds.until, "scheduled_date"),
        where("hearing_type", matches),
    ),
    "update_schedule_location": HEARING.change(
        "location? notes?", "Schedule {schedule_id} updated."
    ),
    "create_document_filing": tool(
        "case_id document_type title filing_date court_name file_path served_parties? notes?",
        create_filing,
    ),
    "get_document_filing": FILING.read(),
}

# --- logistics ------------------------------------------------------------------------------------

CUSTOMS = Kind("customs_declarations", "declaration_id", "customs declaration", "CD-")
DELIVERY = Kind("delivery_schedules", "schedule_id", "delivery schedule")
SHIPMENT = Kind("shipments", "shipment_id", "Shipment")
ITEM = Kind("warehouse_inventories", "inventory_id", "Inventory item", "INV-")
DECLARE = CUSTOMS.add("shipment_id hs_code declared_value status=submitted additional_info?")


def send_carrier_message(world: World, args: Args) -> str:
    """Adds a message to a carrier."""
    me = user(world)
    author = me.get("email") or me.get("name", "system@logistics.example")
    known = args | {"from": author, "message_id": world.new_id("CM-")}
    message = filled("message_id from to subject body timestamp=sent", known)
    if isinstance(world.tables.get("carrier_messages"), dict):
        world.tables["carrier_messages"][message["message_id"]] = message
    else:
        world.tables.setdefault("carrier_messages", []).append(message)
    return f"Carrier message sent to {args['to']}."


def submit_customs(world: World, args: Args) -> Output:
    """Writes into a shipment's first declaration, or into a new one."""
    for declaration in CUSTOMS.records(world).values():
        if equal(declaration, "shipment_id", args["shipment_id"]):
            words = "hs_code declared_value additional_info? status=submitted"
            write(declaration, words, args)
            return declaration
    return DECLARE.action(world, args)


def adjust_quantity(world: World, args: Args) -> str:
    """Adds the adjustment to an item's quantity."""
    key = args["inventory_id"]
    items = ITEM.records(world)
    if key not in items:
        return f"Error: {ITEM.missing(args)}"
    items[key]["quantity"] = items[key].get("quantity", 0) + args["adjustment"]
    return f"Inventory {key} quantity adjusted by {args['adjustment']}."


LOGISTICS = {
    "get_carrier_messages": messages("carrier_messages", where("shipment_id", equal)),
    "send_carrier_message": tool("to subject body", send_carrier_message),
    "get_customs_declaration_by_shipment": CUSTOMS.of_shipment(),
    "submit_customs_declaration": replace(DECLARE, action=submit_customs),
    "get_delivery_schedule": DELIVERY.of_shipment(),
    "get_shipment_by_id": SHIPMENT.read(),
    "search_shipments_by_status": SHIPMENT.find(text("status", alike)),
    "update_shipment_status": SHIPMENT.change(
        "status eta? notes?", "Shipment {shipment_id} updated to status '{status}'."
    ),
    "get_warehouse_inventory_item": ITEM.read(),
    "list_low_stock_items": ITEM.find(must("threshold", worlds.below, "quantity")),
    "add_warehouse_inventory": ITEM.add(
        "sku description quantity warehouse_location comments?",
        "Inventory item {inventory_id} added (SKU: {sku}).",
    ),
    "adjust_warehouse_quantity": tool("inventory_id adjustment", adjust_quantity),
}

# --- real estate ----------------------------------------------------------------------------------

CLIENT = Kind("clients", "client_id", "Client")
REPORT = Kind("inspection_reports", "report_id", "Inspection report", "IR-")
PROPERTY = Kind("property_listings", "property_id", "Property", "PROP-")

REAL_ESTATE = {
    "list_clients": CLIENT.find(),
    "get_client_details": CLIENT.read(),
    "add_client_note": CLIENT.change("notes", "Notes updated for client {client_id}."),
    "schedule_inspection": REPORT.add(
        "property_id inspector_name inspection_date findings= recommendations= overall_condition=",
        "Inspection {report_id} scheduled for property {property_id}.",
    ),
    "get_inspection_report": REPORT.read(),
    "submit_inspection_findings": REPORT.change(
        "findings recommendations", "Findings submitted for inspection report {report_id}."
    ),
    "search_properties": PROPERTY.find(
        given("min_price", worlds.at_least, "price"),
        given("max_price", worlds.at_most, "price"),
        where("location", holds, "address"),
        where("keywords", holds, "address description"),
    ),
    "get_property_details": PROPERTY.read(),
    "create_property": PROPERTY.add(
        "address price bedrooms bathrooms status:active description?? listing_date??",
        "Property {property_id} created at {address}.",
    ),
    "update_property_description": PROPERTY.change(
        "description", "Property {property_id} description updated."
    ),
}

# --- all of them ----------------------------------------------------------------------------------

OFFICES = {
    "healthcare": MESSAGES | HEALTHCARE,
    "hr": HR,
    "ecommerce": ECOMMERCE,
    "education": MESSAGES | EDUCATION,
    "insurance": INSURANCE,
    "it_helpdesk": MESSAGES | HELPDESK,
    "legal": MESSAGES | LEGAL,
    "logistics": LOGISTICS,
    "real_estate": MESSAGES | REAL_ESTATE,
}
# The tools that ignore unknown arguments.
OPEN = """
    send_message get_messages search_orders search_products list_courses create_course
    adjust_financial_aid submit_grade search_students search_assets search_kb_articles
    search_incidents add_billing_entry get_billing_report search_cases search_schedules
    create_document_filing get_carrier_messages submit_customs_declaration update_shipment_status
    add_warehouse_inventory list_clients search_properties create_property
"""
TOOLS = {
    name: replace(made, is_open=name in OPEN.split())
    for tools in OFFICES.values()
    for name, made in tools.items()
}
